"""What one task has of the fleet, or waits for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from miner.fleet.base import Hold, HoldKind, NamedLane, TaskKey
from miner.fleet.layout import FOREVER


class Stage(StrEnum):
    #: GPUs are kept for it; it has not asked for them yet.
    PROMISED = "promised"
    #: It asks for GPUs now.
    WAITING = "waiting"
    #: It has them.
    RUNNING = "running"


@dataclass(slots=True, eq=False)
class Claim:
    key: TaskKey
    kind: HoldKind
    stage: Stage
    #: How many GPUs it would take, in the order of its wishes.
    counts: tuple[int, ...]
    #: Since when it is in the queue, and when it is over at the latest.
    since: float
    until: float
    priority: float = 0.0
    #: An accepted offer's: its window stands. Any other claim's is found anew in the order of the queue.
    firm: bool = False
    exclusive: bool = False
    lane: NamedLane | None = None
    #: What it has or is to have, from when; none while there is no place for it.
    gpus: tuple[str, ...] = ()
    starts_at: float = 0.0
    #: How long was planned for one that is firm, whenever it begins; 0 where nobody planned.
    length: float = 0.0
    #: A job's deadline: its window may move up to there. An offer's window ends where it was to end.
    latest: float = FOREVER
    #: Its inputs do not come: no GPU is kept for it until it asks for some.
    aside: bool = False

    @property
    def is_running(self) -> bool:
        return self.stage is Stage.RUNNING

    def begin(self, now: float, latest: float) -> None:
        """What was planned begins now at the earliest, takes as long as was planned, and is over by `latest`.
        Nobody planned for a claim that is not firm: it may take all the time there is."""
        if self.is_running:
            self.until = min(self.until, latest) if self.firm else latest
        else:
            start = max(self.starts_at, now) if self.gpus else now
            self.until = self._end(start, latest)
            self.starts_at = start if self.gpus else self.until
        self.latest = latest if self.kind is HoldKind.JOB else self.until

    def wait(self, now: float) -> None:
        """Time passes: what could not begin yet begins later, and ends as much later. Without that a job
        that waits longer than it was planned to take would have no time of its own left, and wait on."""
        if self.firm and self.kind is HoldKind.JOB and not self.is_running and self.latest < FOREVER:
            self.begin(now, self.latest)

    def make_firm(self) -> None:
        """What it has is kept for it from now on."""
        if not self.firm:
            self.firm, self.length = True, max(self.until - self.starts_at, 0.0)

    def stretch(self, until: float) -> None:
        """It takes until then, if that is longer than was thought."""
        if until > self.until:
            self.until, self.latest = until, max(self.latest, until)
            self.length = until - self.starts_at if self.firm else 0.0

    def end_at(self, start: float) -> float:
        """When it is over if it begins then."""
        return self._end(start, self.latest) if self.firm else self.until

    def _end(self, start: float, latest: float) -> float:
        if not self.firm or self.length <= 0:
            return latest
        return min(start + self.length, latest)

    def set_window(self, gpus: tuple[str, ...], starts_at: float, until: float | None = None) -> None:
        self.gpus, self.starts_at = gpus, starts_at
        if until is not None:
            self.until = until

    def hold(self) -> Hold:
        # One without a place is written down with its length, which a later life finds it a place by.
        start = self.starts_at if self.gpus else self.until - self.length
        return Hold(self.key, self.kind, self.gpus, start, self.until, self.priority)
