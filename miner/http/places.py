"""How many connections there may be, and which of them makes way for another."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Generic, TypeVar

ConnectionT = TypeVar("ConnectionT")


class Places(Generic[ConnectionT]):
    """Open connections by the network that they come from. Each operation takes the same time however many
    there are: otherwise those who open connections fast would make every one of them expensive."""

    def __init__(self, limit: int, per_network: int) -> None:
        self._limit, self._per_network = limit, per_network
        self._taken: Counter[str] = Counter()
        self._total = 0
        #: The connections that may have to make way, by network, the oldest first.
        self._idle: dict[str, dict[ConnectionT, None]] = {}
        #: The networks by their number of idle connections, and the largest of these numbers.
        self._networks: defaultdict[int, dict[str, None]] = defaultdict(dict)
        self._most_idle = 0

    @property
    def has_room(self) -> bool:
        return self._total < self._limit

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
        """The oldest idle connection of a network; by default, of the network that has most."""
        if network is None:
            network = next(iter(self._networks.get(self._most_idle, ())), "")
        return next(iter(self._idle.get(network, ())), None)

    def _resize(self, network: str, before: int, now: int) -> None:
        """Move a network; the two numbers differ by one, so the largest changes by one at most."""
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
