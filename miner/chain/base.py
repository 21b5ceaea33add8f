"""TEMP: replaced by the chain branch."""

from __future__ import annotations
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from miner.fiber import public_key


@dataclass(frozen=True, slots=True)
class Node:
    uid: int
    hotkey: str
    coldkey: str
    stake: float
    validator_permit: bool
    ip: str | None
    port: int | None
    incentive: float = 0.0
    last_update: int = 0
    emission: float = 0.0


@dataclass(frozen=True)
class Metagraph:
    netuid: int
    block: int | None
    fetched_at: float
    source: str
    nodes: tuple[Node, ...]

    @cached_property
    def by_key(self) -> Mapping[bytes, Node]:
        return {public_key(n.hotkey) or b"": n for n in self.nodes}

    def find(self, key: bytes) -> Node | None:
        return self.by_key.get(key)
