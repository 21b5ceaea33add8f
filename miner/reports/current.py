"""Indicators and money of now, for the page."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from typing import NamedTuple

from miner.api.reports import Kpi, Money
from miner.fleet.fleet_file import Prices
from miner.offers.policies.schema import PolicyTargets
from miner.reports.kpis import DAY, kpis
from miner.reports.money import period_money
from miner.store.store import Store

#: The page asks every two seconds; nothing here changes faster than jobs end.
_CACHED_SECONDS = 30.0


class Figures(NamedTuple):
    kpis: list[Kpi]
    #: Of the last 24 hours.
    money: Money | None


class CurrentFigures:
    """The indicators and the money, read off the event loop and kept for half a minute."""

    def __init__(
        self,
        store: Store,
        targets: Callable[[], PolicyTargets],
        prices: Callable[[], Prices],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._targets, self._prices, self._clock = store, targets, prices, clock
        self._read_at = float("-inf")
        self._figures = Figures([], None)
        self._lock = asyncio.Lock()

    async def read(self) -> Figures:
        async with self._lock:
            now = self._clock()
            if not 0 <= now - self._read_at < _CACHED_SECONDS:
                self._figures = await self._store.read(_figures, now, self._targets(), self._prices())
                self._read_at = now
            return self._figures


def _figures(connection: sqlite3.Connection, now: float, targets: PolicyTargets, prices: Prices) -> Figures:
    return Figures(kpis(connection, now, targets), period_money(connection, now - DAY, now, prices))
