"""A wall clock that ignores a sudden jump at first.

Deadlines are times of day, and a clock that jumps ten hours ahead would end every job at once. A jump is
therefore ignored, and time goes on by the boot clock, which nobody sets, until a validator's signed request
agrees with the jump (requests carry their sender's time), or for ten minutes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

#: A smaller change is a correction, not a jump.
TOLERANCE_SECONDS = 30.0
#: After this time a jump that nobody confirmed is accepted.
TRUST_SECONDS = 600.0


def _seconds_since_boot() -> float:
    """Seconds since boot, sleep included, whatever the time of day is set to."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SteadyClock:
    def __init__(
        self,
        *,
        wall: Callable[[], float] = time.time,
        running: Callable[[], float] = _seconds_since_boot,
        on_jump: Callable[[str], None] = lambda _text: None,
        trust_seconds: float = TRUST_SECONDS,
    ) -> None:
        """`on_jump` is called with a text for people when a jump is seen."""
        self._wall, self._running = wall, running
        self._on_jump = on_jump
        self._trust_seconds = trust_seconds
        self._offset = wall() - running()
        #: The jump that is not accepted yet: the offset since then, and when it was seen.
        self._doubted: tuple[float, float] | None = None

    def __call__(self) -> float:
        wall, running = self._wall(), self._running()
        offset = wall - running
        if abs(offset - self._offset) <= TOLERANCE_SECONDS:
            self._offset, self._doubted = offset, None
            return wall
        if self._doubted is None or abs(offset - self._doubted[0]) > TOLERANCE_SECONDS:
            self._doubted = (offset, running)
            self._report(offset)
        elif running - self._doubted[1] >= self._trust_seconds:
            self._accept(offset, "lasted")
            return wall
        return running + self._offset

    @property
    def doubted_seconds(self) -> float | None:
        """Seconds by which the system's clock is ahead of this one, or None if no jump is doubted."""
        return None if self._doubted is None else self._doubted[0] - self._offset

    def confirm(self) -> None:
        """Accept a doubted jump: another machine's clock agrees with the system's."""
        if self._doubted is not None:
            self._accept(self._wall() - self._running(), "a validator confirms")

    def _accept(self, offset: float, why: str) -> None:
        log.warning("the clock jumped by %.0f s, which %s: it is accepted", offset - self._offset, why)
        self._offset, self._doubted = offset, None

    def _report(self, offset: float) -> None:
        jump = offset - self._offset
        direction = "ahead" if jump > 0 else "back"
        self._on_jump(
            f"the system's clock jumped {abs(jump):.0f} s {direction}; time goes on as before until a "
            f"validator's request agrees with it, or for {self._trust_seconds:g} s; is it synchronised?",
        )
