"""Rate limits: token buckets in a table that can't grow without end."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Rate:
    """So many per second on average, so many at once."""

    per_second: float
    burst: float


class Buckets:
    """A bucket per key. The least recently used key is forgotten first, which only ever favours that key."""

    def __init__(
        self, rate: Rate, *, max_keys: int = 20_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = rate
        self._max_keys = max_keys
        self._clock = clock
        self._levels: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._levels)

    def is_empty(self, key: Hashable) -> bool:
        return self._level(key) < 1.0

    def take(self, key: Hashable) -> bool:
        """Take one; False, and nothing taken, when the bucket is empty."""
        level = self._level(key)
        if level < 1.0:
            return False
        self._levels[key] = (level - 1.0, self._clock())
        self._levels.move_to_end(key)
        if len(self._levels) > self._max_keys:
            self._levels.popitem(last=False)
        return True

    def seconds_until_next(self, key: Hashable) -> float:
        return max(0.0, (1.0 - self._level(key)) / self._rate.per_second)

    def _level(self, key: Hashable) -> float:
        known = self._levels.get(key)
        if known is None:
            return self._rate.burst
        level, at = known
        return min(self._rate.burst, level + max(0.0, self._clock() - at) * self._rate.per_second)


@lru_cache(maxsize=4096)
def network_of(address: str) -> str:
    """What counts as one caller: an IPv4 address, or the /64 that one IPv6 customer owns."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return address
