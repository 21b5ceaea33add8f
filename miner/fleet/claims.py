"""What one task has of the fleet, or waits for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from miner.fleet.base import Hold, HoldKind, NamedLane, TaskKey


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

    @property
    def is_running(self) -> bool:
        return self.stage is Stage.RUNNING

    def begin(self, now: float, latest: float) -> None:
        """What was planned begins now at the earliest, takes as long as was planned, and is over by `latest`.
        Nobody planned for a claim that is not firm: it may take all the time there is."""
        if not self.firm:
            self.until = latest
        elif not self.is_running:
            length = self.until - self.starts_at
            self.starts_at = max(self.starts_at, now)
            self.until = self.starts_at + length
        self.until = min(self.until, latest)

    def set_window(self, gpus: tuple[str, ...], starts_at: float) -> None:
        self.gpus, self.starts_at = gpus, starts_at

    def hold(self) -> Hold:
        return Hold(self.key, self.kind, self.gpus, self.starts_at, self.until, self.priority)
