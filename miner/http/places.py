"""Limits on open connections, and the choice of one to close for a new one."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Generic, TypeVar

ConnectionT = TypeVar("ConnectionT")


class Places(Generic[ConnectionT]):
    """Open connections by network. Each operation takes constant time: otherwise a flood of connections would
    make each one expensive."""

    def __init__(self, limit: int, per_network: int) -> None:
        self._limit, self._per_network = limit, per_network
        self._taken: Counter[str] = Counter()
        self._total = 0
        #: Connections that may be closed for new ones, by network, the oldest first.
        self._idle: dict[str, dict[ConnectionT, None]] = {}
        #: Networks by their number of idle connections, and the largest such number.
        self._networks: defaultdict[int, dict[str, None]] = defaultdict(dict)
        self._most_idle = 0

    @property
    def is_over(self) -> bool:
        return self._total > self._limit

    def is_over_for(self, network: str) -> bool:
        return self._taken[network] > self._per_network

    def enter(self, network: str) -> None:
        self._total += 1
        self._taken[network] += 1

    def leave(self, connection: ConnectionT, network: str) -> None:
        self.set_busy(connection, network)
        self._total -= 1
        self._taken[network] -= 1
        if not self._taken[network]:
            del self._taken[network]

    def set_idle(self, connection: ConnectionT, network: str) -> None:
        idle = self._idle.setdefault(network, {})
        if connection not in idle:
            idle[connection] = None
            self._resize(network, len(idle) - 1, len(idle))

    def set_busy(self, connection: ConnectionT, network: str) -> None:
        idle = self._idle.get(network, {})
        if connection in idle:
            del idle[connection]
            self._resize(network, len(idle) + 1, len(idle))

    def oldest_idle(self, network: str | None = None) -> ConnectionT | None:
        """Return the oldest idle connection of a network, by default of the network with the most."""
        if network is None:
            network = next(iter(self._networks.get(self._most_idle, ())), "")
        return next(iter(self._idle.get(network, ())), None)

    def _resize(self, network: str, before: int, now: int) -> None:
        """Move a network between two counts, which differ by one: so the largest changes by at most one."""
        if before:
            del self._networks[before][network]
        if now:
            self._networks[now][network] = None
        else:
            del self._idle[network]
        self._most_idle = max(self._most_idle, now)
        if self._most_idle and not self._networks[self._most_idle]:
            del self._networks[self._most_idle]
            self._most_idle -= 1
