"""Offset of this machine's clock from the validators', by the times that they sign.

Every signed request carries its sender's time. Of requests that are refused for their time the difference
counts as well: they are what a clock that is off looks like. One validator alone may be wrong itself, so at
least two must agree.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

#: Requests that count of each validator: with three, one that was under way for long changes nothing.
REQUESTS_EACH = 3
#: Ignore offsets older than this.
MAX_AGE_SECONDS = 3600.0
MIN_VALIDATORS = 2
#: Only validators on the metagraph get this far.
MAX_VALIDATORS = 256


class ClockOffset(NamedTuple):
    #: Seconds that this clock is ahead; negative if it is behind.
    seconds: float
    validators: int


@dataclass(slots=True)
class _SignedTimes:
    """The newest requests of one validator: when they came, and how far this clock was ahead."""

    stamp_ns: int = 0
    offsets: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=REQUESTS_EACH))


class ClockOffsets:
    """On the way of an offer this costs an append."""

    def __init__(self, running: Callable[[], float] = time.monotonic) -> None:
        """`running` is a clock that nobody sets."""
        self._running = running
        self._validators: dict[bytes, _SignedTimes] = {}

    def note(self, key: bytes, stamp_ns: int, ahead: float) -> None:
        """Note a request whose signature verified and whose nonce is new."""
        known = self._validators.get(key)
        if known is None:
            if len(self._validators) >= MAX_VALIDATORS:
                return
            known = self._validators[key] = _SignedTimes()
        known.stamp_ns = stamp_ns
        known.offsets.append((self._running(), ahead))

    def note_refused(self, key: bytes, stamp_ns: int, ahead: float) -> None:
        """Note a request that is refused for its time. An old one that somebody sends again is left out:
        it was signed before what this validator sent last."""
        known = self._validators.get(key)
        if known is None or stamp_ns > known.stamp_ns:
            self.note(key, stamp_ns, ahead)

    def measure(self) -> ClockOffset | None:
        """Return the median over validators; None while too few have sent anything in the last hour."""
        oldest = self._running() - MAX_AGE_SECONDS
        for key in [key for key, known in self._validators.items() if known.offsets[-1][0] < oldest]:
            del self._validators[key]
        values = sorted(
            median(ahead for at, ahead in known.offsets if at >= oldest)
            for known in self._validators.values()
        )
        if len(values) < MIN_VALIDATORS:
            return None
        # Of two in the middle the one nearer to 0, so that one of two validators cannot raise an alarm.
        middle = values[(len(values) - 1) // 2 : len(values) // 2 + 1]
        return ClockOffset(min(middle, key=abs), len(values))
