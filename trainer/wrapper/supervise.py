"""One child from start to end: what may end it besides itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from core.run_files import RunEnd
from core.units import show_seconds
from trainer.wrapper.processes import dump_stacks, memory_kills, reap
from trainer.wrapper.signals import StopRequest

POLL_S = 0.2
#: Zombies of the launcher's making are cleared this often.
REAP_S = 10.0
#: From being asked to stop to being ended: an evaluation, a save and a checkpoint, each bounded by the
#: session.
STOP_S = 75.0
#: Stacks are dumped, and have this long to reach the log, before a hanging training is ended.
DUMP_S = 2.0


class Running(Protocol):
    """What is supervised."""

    @property
    def tail(self) -> Iterable[str]:
        """The last lines that it wrote."""

    @property
    def pid(self) -> int: ...

    def ended(self) -> int | None: ...

    def close(self) -> int: ...


class Verdict(NamedTuple):
    """Why the wrapper ended a child."""

    end: RunEnd
    detail: str


class Ended(NamedTuple):
    code: int
    #: None: it ended by itself.
    verdict: Verdict | None
    tail: tuple[str, ...]
    #: How often the kernel killed something of this container for memory meanwhile.
    oom_kills: int = 0


@dataclass
class Limits:
    """Seconds since the epoch, or files whose age is looked at."""

    #: Whoever still runs then is ended.
    hard_end: float
    #: Until this exists nothing has been trained that would be worth waiting for.
    begun: Path | None = None
    #: Must exist after so many seconds: our plugin's sign of life.
    marker: Path | None = None
    marker_s: float = 600.0
    #: The last of these to change says when the training last moved.
    signs: tuple[Path, ...] = ()
    hang_s: float = 3600.0
    #: Another reason to end it, asked all the time.
    more: Callable[[], Verdict | None] = lambda: None


def supervise(
    child: Running, limits: Limits, stop: StopRequest, now: Callable[[], float] = time.time
) -> Ended:
    """Waits for the child's end, and sees to it when it does not come by itself."""
    watch = _Watch(limits, stop, now, began=now())
    verdict = None
    kills = memory_kills()
    reaped = now()
    while child.ended() is None and (verdict := watch.look()) is None:
        time.sleep(POLL_S)
        if now() - reaped > REAP_S:
            reap(child.pid)
            reaped = now()
    if verdict is not None and verdict.end is not RunEnd.STOPPED and dump_stacks():
        # Image engines have nobody who answers, and what is left of the time is for their last file.
        time.sleep(DUMP_S)
    code = child.close()
    return Ended(code, verdict, tuple(child.tail), memory_kills() - kills)


@dataclass
class _Watch:
    limits: Limits
    stop: StopRequest
    now: Callable[[], float]
    began: float
    asked_at: float | None = None

    def look(self) -> Verdict | None:
        now, limits = self.now(), self.limits
        if self.stop.asked:
            self.asked_at = self.asked_at or now
            if limits.begun is None or not limits.begun.exists():
                return Verdict(RunEnd.STOPPED, "asked to stop before the first step")
            if now - self.asked_at > STOP_S:
                return Verdict(RunEnd.STOPPED, f"asked to stop, still running {show_seconds(STOP_S)} later")
        if now > limits.hard_end:
            return Verdict(RunEnd.CLOCK, "the time was over and the training still ran: ended from outside")
        if limits.marker is not None and not limits.marker.exists() and now - self.began > limits.marker_s:
            return Verdict(
                RunEnd.CRASHED, "the engine has not loaded our plugin: nothing would keep the time"
            )
        quiet = now - max([self.began, *(_changed(path) for path in limits.signs)])
        if quiet > limits.hang_s:
            return Verdict(RunEnd.HUNG, f"no sign of life for {show_seconds(quiet)}")
        return limits.more()


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
