"""Decide which claim gets GPUs now and which later: one pass over all claims.

Running jobs keep what they have. Accepted offers keep their window as long as its GPUs are there. The
others are placed in queue order, each in a window that those behind it may not touch: a small job may go
ahead of a large one that waits, but never make it wait longer. Whoever has waited for `patience` seconds
goes first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from core.domain.keys import GpuReservation, NamedLane, ReservationKind, TaskKey
from miner.fleet.base import GpuOption, NodeGpus
from miner.fleet.placement import (
    FOREVER,
    OVERDUE_SECONDS,
    FreeWindow,
    GpuCalendar,
    NodeFilter,
)


class ClaimStage(StrEnum):
    #: GPUs are reserved for it; it has not requested them yet.
    RESERVED = "reserved"
    #: It waits for GPUs.
    WAITING = "waiting"
    #: It has them.
    RUNNING = "running"


@dataclass(slots=True, eq=False)
class GpuClaim:
    key: TaskKey
    kind: ReservationKind
    stage: ClaimStage
    #: Which GPUs would do, the most wanted first.
    options: tuple[GpuOption, ...]
    #: Since when it is in the queue, and when it is over at the latest.
    since: float
    until: float
    priority: float = 0.0
    #: An accepted offer's window is fixed. That of any other claim is found again in the order of the queue.
    firm: bool = False
    exclusive: bool = False
    lane: NamedLane | None = None
    #: What it has or is to have, from when; none while there is no window for it.
    gpus: tuple[str, ...] = ()
    starts_at: float = 0.0
    #: The planned duration of a firm one, whenever it begins; 0 where none was planned.
    duration: float = 0.0
    #: How long it takes, as far as is known. Where others' use leaves no window up to its end, a claim that
    #: is not firm is content with a window of that length.
    needs: float = 0.0
    #: A job's deadline: its window may move up to there. An offer's window ends where it was planned to end.
    latest: float = FOREVER
    #: Its inputs do not arrive: no GPU is kept for it until it requests some.
    yielded: bool = False

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(option.gpus for option in self.options)

    @property
    def is_running(self) -> bool:
        return self.stage is ClaimStage.RUNNING

    def begin(self, now: float, latest: float) -> None:
        """Let it begin now at the earliest, take as long as was planned, and be over by `latest`. A claim
        that is not firm has no planned duration: it may take all the time there is."""
        if self.is_running:
            self.until = min(self.until, latest) if self.firm else latest
        else:
            start = max(self.starts_at, now) if self.gpus else now
            self.until = self._end(start, latest)
            self.starts_at = start if self.gpus else self.until
        self.latest = latest if self.kind is ReservationKind.JOB else self.until

    def postpone(self, now: float) -> None:
        """Let a window that could not begin yet begin later, and end as much later. Without that a job that
        waits longer than its planned duration would have no time left, and would wait for ever."""
        if self.firm and self.kind is ReservationKind.JOB and not self.is_running and self.latest < FOREVER:
            self.begin(now, self.latest)

    def make_firm(self) -> None:
        """Keep what it has for it from now on."""
        if not self.firm:
            self.firm, self.duration = True, max(self.until - self.starts_at, 0.0)

    def extend(self, until: float) -> None:
        """Move its end, to later only."""
        if until > self.until:
            self.until, self.latest = until, max(self.latest, until)
            self.duration = until - self.starts_at if self.firm else 0.0

    def end_at(self, start: float) -> float:
        """When it is over if it begins at `start`."""
        return self._end(start, self.latest) if self.firm else self.until

    def early_end_at(self, start: float) -> float:
        """The same by what it needs, of one that is not firm."""
        return min(start + self.needs, self.until)

    def _end(self, start: float, latest: float) -> float:
        if not self.firm or self.duration <= 0:
            return latest
        return min(start + self.duration, latest)

    def set_window(self, gpus: tuple[str, ...], starts_at: float, until: float | None = None) -> None:
        self.gpus, self.starts_at = gpus, starts_at
        if until is not None:
            self.until = until

    def reservation(self) -> GpuReservation:
        # Without a window, its duration is recorded: by that it is given a window after a restart.
        start = self.starts_at if self.gpus else self.until - self.duration
        return GpuReservation(self.key, self.kind, self.gpus, start, self.until, self.priority)


#: Claims of the queue that get a window. Those behind wait for one: a queue that long is not served today.
MAX_PLANNED_CLAIMS = 64


@dataclass(frozen=True, slots=True)
class QueueRules:
    #: A job that has waited this long goes before all that have not.
    patience: float = 3600.0
    #: Jobs that may have GPUs at the same time.
    max_running: int = 10_000


class SchedulableGpus(NamedTuple):
    nodes: Sequence[NodeGpus]
    #: Used a little by somebody else: not for a job that wants its GPUs to itself.
    shared: frozenset[str] = frozenset()
    #: Not to be given out at this moment.
    unclean: frozenset[str] = frozenset()


def queue_order(claim: GpuClaim, now: float, patience: float) -> tuple[int, float, float]:
    if now - claim.since >= patience:
        return (0, claim.since, 0.0)
    return (1, -claim.priority, claim.since)


class SchedulingPass:
    """One pass over all claims, which are changed; `granted` are those that got GPUs."""

    def __init__(
        self, claims: Collection[GpuClaim], gpus: SchedulableGpus, now: float, rules: QueueRules
    ) -> None:
        self.granted: list[GpuClaim] = []
        self._gpus = gpus
        self._nodes = NodeFilter(gpus.nodes)
        self._ids = {gpu.id for node in gpus.nodes for gpu in node.usable}
        self._calendar = GpuCalendar(now)
        for node in gpus.nodes:
            self._calendar.add_others(node.every)
        self._others_use_some = any(gpu.busy for node in gpus.nodes for gpu in node.usable)
        self._now, self._rules = now, rules
        running = [claim for claim in claims if claim.is_running]
        waiting = [claim for claim in claims if not claim.is_running and not claim.yielded]
        self._slots_left = rules.max_running - len(running)
        for claim in running:
            self._calendar.add(claim.gpus, claim.starts_at, max(claim.until, now + OVERDUE_SECONDS))
        for claim in claims:
            if claim.yielded:
                claim.set_window((), claim.until)
        self._keep_reservations([claim for claim in waiting if claim.firm])
        self._serve([claim for claim in waiting if claim.until > now])

    def _keep_reservations(self, firm: list[GpuClaim]) -> None:
        """Keep the reservations that are still possible; find other GPUs for the rest, started jobs first."""
        moved = []
        for claim in sorted(
            firm, key=lambda claim: (claim.kind is ReservationKind.OFFER, claim.starts_at, claim.since)
        ):
            if claim.gpus and self._still_possible(claim):
                self._calendar.add(claim.gpus, claim.starts_at, claim.until)
            else:
                moved.append(claim)
        for claim in moved:
            # A waiting claim has named what would do; for others, fewer are better than none.
            fewer: tuple[GpuOption, ...] = ()
            if claim.stage is not ClaimStage.WAITING and claim.options:
                most = max(claim.options, key=lambda option: option.gpus)
                fewer = tuple(GpuOption(count, most.nodes) for count in range(most.gpus - 1, 0, -1))
            self._plan(claim, (claim.options, fewer))

    def _still_possible(self, claim: GpuClaim) -> bool:
        start = max(claim.starts_at, self._now)
        return self._ids.issuperset(claim.gpus) and all(
            self._calendar.is_free(gpu, start, claim.until) for gpu in claim.gpus
        )

    def _serve(self, waiting: list[GpuClaim]) -> None:
        order = sorted(waiting, key=lambda claim: queue_order(claim, self._now, self._rules.patience))
        for claim in order[MAX_PLANNED_CLAIMS:]:
            if not claim.firm:
                claim.set_window((), claim.until)
        for claim in order[:MAX_PLANNED_CLAIMS]:
            if claim.firm and claim.gpus:
                self._calendar.remove(claim.gpus, claim.starts_at, claim.until)
            if claim.stage is ClaimStage.WAITING and self._grant(claim):
                self.granted.append(claim)
            elif claim.firm and self._may_wait(claim):
                self._calendar.add(claim.gpus, claim.starts_at, claim.until)
            else:
                self._plan(claim, (claim.options,))

    def _may_wait(self, claim: GpuClaim) -> bool:
        """Return True if the claim can use what is reserved for it."""
        return claim.stage is ClaimStage.RESERVED or any(
            option.is_met(claim.gpus) for option in claim.options
        )

    def _grant(self, claim: GpuClaim) -> bool:
        if self._slots_left <= 0:
            return False
        now, unclean = self._now, self._gpus.unclean
        options = claim.options
        if claim.firm and claim.gpus and claim.starts_at > now:
            # That so many later train more than fewer now was decided when they were reserved.
            options = tuple(option for option in options if option.gpus >= len(claim.gpus))
        window = self._reserved_window(claim) or next(self._windows(claim, options, now, unclean), None)
        if window is None:
            return False
        claim.stage = ClaimStage.RUNNING
        claim.set_window(window.gpus, window.start, window.end)
        self._calendar.add(window.gpus, window.start, window.end)
        self._slots_left -= 1
        return True

    def _reserved_window(self, claim: GpuClaim) -> FreeWindow | None:
        """The very GPUs that were reserved, where they are as many as are wanted most."""
        if not (claim.firm and claim.gpus and claim.starts_at <= self._now):
            return None
        bad = {*self._gpus.unclean, *(self._gpus.shared if claim.exclusive else ())}
        fits = bool(claim.options) and claim.options[0].is_met(claim.gpus)
        if not fits or not bad.isdisjoint(claim.gpus) or not self._ids.issuperset(claim.gpus):
            return None
        free = all(self._calendar.is_free(gpu, self._now, claim.until) for gpu in claim.gpus)
        return FreeWindow(claim.gpus, self._now, claim.until) if free else None

    def _plan(self, claim: GpuClaim, alternatives: Sequence[Sequence[GpuOption]]) -> None:
        """Give it the window that begins first, of the first alternative that has any."""
        claim.set_window((), claim.until)
        for options in alternatives:
            latest = claim.latest if claim.firm else claim.until
            windows = self._windows(claim, options, latest)
            window = min(windows, key=lambda window: window.start, default=None)
            if window is not None:
                claim.set_window(window.gpus, window.start, window.end)
                self._calendar.add(window.gpus, window.start, window.end)
                return

    def _windows(
        self,
        claim: GpuClaim,
        options: Sequence[GpuOption],
        latest: float,
        without: frozenset[str] = frozenset(),
    ) -> Iterator[FreeWindow]:
        """The first window for each option, in their order."""
        bad = without | self._gpus.shared if claim.exclusive else without
        ends, is_found = [claim.end_at], False
        if self._others_use_some and claim.needs and not claim.firm:
            ends.append(claim.early_end_at)
        for end_of in ends:
            for option in options:
                for _, nodes in self._nodes.candidates(option.nodes, claim.lane, bad):
                    window = self._calendar.earliest(
                        nodes, option.gpus, latest=latest, end_of=end_of, over=option.over
                    )
                    if window is not None:
                        is_found = True
                        yield window
            if is_found:
                return
