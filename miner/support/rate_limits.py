"""Rate limits: token buckets in a table of bounded size."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RateLimit:
    """`per_second` on average, `burst` at once."""

    per_second: float
    burst: float


class TokenBuckets:
    """A bucket per key. The least recently used key is dropped first, which only favours that key."""

    def __init__(
        self, rate: RateLimit, *, max_keys: int = 20_000, clock: Callable[[], float] = time.monotonic
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
        """Take one token; False if the bucket is empty."""
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
