"""The time of day, as far as it can be believed.

Deadlines are times of day, and a clock that jumps ten hours ahead would end every job at once. So a jump is
not believed when it is first seen: time goes on from before it, by a clock that nobody sets. It is believed
once a validator's signed request agrees with it (requests carry their sender's time), or when the clock has
stood by it for a while.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

#: Less than this is put right, not a jump.
TOLERANCE_SECONDS = 30.0
#: So long a clock has to stand by a jump that nobody confirms.
TRUST_SECONDS = 600.0


def _running() -> float:
    """Seconds that pass also while the machine sleeps, whatever the time of day is set to."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SteadyClock:
    def __init__(
        self,
        *,
        wall: Callable[[], float] = time.time,
        running: Callable[[], float] = _running,
        told: Callable[[str, str], None] = lambda _kind, _text: None,
        trust_seconds: float = TRUST_SECONDS,
    ) -> None:
        """`told` hears of a jump, as an alert: kind and text."""
        self._wall, self._running = wall, running
        self._told = told
        self._trust_seconds = trust_seconds
        self._offset = wall() - running()
        #: The jump that is not believed yet: the offset since then, and when it was seen.
        self._doubted: tuple[float, float] | None = None

    def __call__(self) -> float:
        wall, running = self._wall(), self._running()
        offset = wall - running
        if abs(offset - self._offset) <= TOLERANCE_SECONDS:
            self._offset, self._doubted = offset, None
            return wall
        if self._doubted is None or abs(offset - self._doubted[0]) > TOLERANCE_SECONDS:
            self._doubted = (offset, running)
            self._tell(offset)
        elif running - self._doubted[1] >= self._trust_seconds:
            self._believe(offset, "has stood by it")
            return wall
        return running + self._offset

    @property
    def doubted_seconds(self) -> float | None:
        """How far the clock of the system is ahead of what is believed; None: it is believed."""
        return None if self._doubted is None else self._doubted[0] - self._offset

    def confirm(self) -> None:
        """Somebody else's clock agrees with the system's."""
        if self._doubted is not None:
            self._believe(self._wall() - self._running(), "is confirmed by a validator")

    def _believe(self, offset: float, why: str) -> None:
        log.warning("the clock jumped by %.0f s and %s: it is believed", offset - self._offset, why)
        self._offset, self._doubted = offset, None

    def _tell(self, offset: float) -> None:
        jump = offset - self._offset
        direction = "ahead" if jump > 0 else "back"
        self._told(
            "clock_jumped",
            f"the system's clock jumped {abs(jump):.0f} s {direction}; time goes on as before until a "
            f"validator's request agrees with it, or for {self._trust_seconds:g} s; is it synchronised?",
        )
