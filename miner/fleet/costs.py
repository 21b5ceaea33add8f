"""Costs of GPUs by their ids, as attempts and measurements name them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from miner.fleet.fleet_file import Prices
from miner.store.samples import gpu_kinds


@dataclass(frozen=True, slots=True)
class GpuCosts:
    prices: Prices
    #: By GPU.
    kinds: Mapping[str, str]

    @classmethod
    def read(cls, connection: sqlite3.Connection, prices: Prices) -> GpuCosts:
        return cls(prices, gpu_kinds(connection) if prices.by_kind else {})

    def per_hour(self, gpu: str) -> float | None:
        return self.prices.of(self.kinds.get(gpu))

    def of(self, gpus: Iterable[str], seconds: float) -> float | None:
        """Return the dollars for some GPUs and a time, or None if one of them has no price."""
        prices = [self.per_hour(gpu) for gpu in gpus]
        known = [price for price in prices if price is not None]
        return sum(known) * seconds / 3600 if known and len(known) == len(prices) else None
