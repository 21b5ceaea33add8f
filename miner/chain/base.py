"""The subnet as the miner sees it, and the one interface through which it looks."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from miner.fiber import public_key


@dataclass(frozen=True, slots=True)
class Node:
    """One registered hotkey.

    `stake` is the chain's total stake, alpha plus weighted TAO. The reference miner's fiber reads alpha only;
    the total is never smaller, and turning a validator away costs more than answering one.
    """

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

    @property
    def address(self) -> str | None:
        """`ip:port` as published, None when nothing is."""
        return None if self.ip is None or self.port is None else endpoint(self.ip, self.port)


@dataclass(frozen=True)
class Metagraph:
    """Every node of one subnet at one moment. Immutable: readers need no lock, a refresh swaps it whole."""

    netuid: int
    block: int | None
    fetched_at: float
    source: str
    nodes: tuple[Node, ...]
    genesis: str | None = None
    by_key: Mapping[bytes, Node] = field(init=False, repr=False, compare=False)
    _incentives: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        keyed: dict[bytes, Node] = {}
        for node in self.nodes:
            key = public_key(node.hotkey)
            if key is None:
                raise ValueError(f"uid {node.uid}: hotkey {node.hotkey!r} is no ss58 address")
            if key in keyed:
                raise ValueError(f"uids {keyed[key].uid} and {node.uid} have the same hotkey {node.hotkey}")
            keyed[key] = node
        object.__setattr__(self, "by_key", MappingProxyType(keyed))
        object.__setattr__(self, "_incentives", tuple(sorted(node.incentive for node in self.nodes)))

    def find(self, key: bytes) -> Node | None:
        """The node behind a 32-byte public key. Not by address: one key has an address per network."""
        return self.by_key.get(key)

    def rank(self, key: bytes) -> int | None:
        """Place in the order of incentive, 1 is best, equals share a place; None for an unknown key.

        The chain's own `rank` is no longer computed and reads 0.0 for everyone.
        """
        node = self.find(key)
        if node is None:
            return None
        return 1 + len(self._incentives) - bisect_right(self._incentives, node.incentive)

    def seen_again(self, at: float) -> Metagraph:
        """The same nodes, found unchanged at a later moment."""
        again = copy.copy(self)
        object.__setattr__(again, "fetched_at", at)
        return again


class PublishOutcome(StrEnum):
    """What became of a request to publish the axon."""

    PUBLISHED = "published"
    UNCHANGED = "unchanged"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class PublishResult:
    outcome: PublishOutcome
    message: str
    block_hash: str | None = None

    @property
    def ok(self) -> bool:
        return self.outcome in (PublishOutcome.PUBLISHED, PublishOutcome.UNCHANGED)


class ChainSource(Protocol):
    """Where the nodes of a subnet come from. Every call either ends in bounded time or raises."""

    @property
    def name(self) -> str:
        """What is asked, in a form that may be shown: no tokens in it."""
        ...

    @property
    def netuid(self) -> int: ...

    @property
    def genesis(self) -> str | None:
        """The chain's genesis hash: known beforehand, or learned from the node; None while neither."""
        ...

    @property
    def poll_seconds(self) -> float | None:
        """How often asking is cheap enough not to wait longer; None leaves it to the operator's setting."""
        ...

    async def metagraph(self) -> Metagraph: ...

    async def publish_axon(self, ip: str, port: int) -> PublishResult: ...

    async def close(self) -> None: ...


def endpoint(ip: str, port: int) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
