"""Rate limits: our own, as token buckets in a table of bounded size, and a server's, by `Retry-After`."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime


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


def retry_after(header: str | None) -> float | None:
    """Return the seconds of the header `Retry-After`, a number or a date, or None if it is neither."""
    value = (header or "").strip()
    number = value.partition(".")[0]
    if number.isdecimal():
        return float(number[:6])
    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError):
        return None
