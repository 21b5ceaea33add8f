"""How fast an upload goes, and whether it will be done in time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

#: Over which the speed is taken: long enough for the gaps between files, short enough to notice a change.
WINDOW_SECONDS = 30.0
#: Nothing is foretold from less.
LEAST_SECONDS = 3.0
_MEGA = 1e6


class Pace:
    def __init__(
        self, finish_by: float | None, clock: Callable[[], float], late: Callable[[str], None]
    ) -> None:
        """`late` is told once when the upload will not be done by `finish_by`, and once more if it will."""
        self._finish_by = finish_by
        self._clock = clock
        self._late = late
        self._seen: deque[tuple[float, int]] = deque()
        self._is_late = False

    def at(self, done: int, total: int) -> None:
        now = self._clock()
        if self._seen and done < self._seen[-1][1]:
            self._seen.clear()  # another try
        self._seen.append((now, done))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_SECONDS:
            self._seen.popleft()
        self._tell(now, done, total)

    @property
    def speed(self) -> float | None:
        """Bytes per second; None while nothing can be said."""
        if len(self._seen) < 2:
            return None
        (first, start), (last, end) = self._seen[0], self._seen[-1]
        return (end - start) / (last - first) if last - first >= LEAST_SECONDS else None

    def _tell(self, now: float, done: int, total: int) -> None:
        speed = self.speed
        if self._finish_by is None or speed is None:
            return
        left = self._finish_by - now
        needed = (total - done) / speed if speed > 0 else float("inf")
        if needed > left and not self._is_late:
            self._is_late = True
            rest = f"{(total - done) / _MEGA:,.0f} MB to go at {speed / _MEGA:,.1f} MB/s"
            self._late(f"the upload will not be done in time: {rest}, and {max(left, 0):,.0f} s are left")
        elif needed < left * 0.9 and self._is_late:
            self._is_late = False
            self._late(f"the upload will be done in time after all, at {speed / _MEGA:,.1f} MB/s")
