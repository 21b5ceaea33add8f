"""Keep who holds which GPUs, from when until when: in memory, without a clock or a task of its own.

Every call names its instant, so deciding about an offer and reserving its GPUs cannot be overtaken. What
must survive the process is in the store.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from core.domain.keys import GpuReservation, NamedLane, Placement, ReservationKind, TaskKey, nodes_of
from miner.fleet.base import Gpu, GpuOption, NodeGpus, group_by_node
from miner.fleet.placement import FOREVER, GpuCalendar
from miner.fleet.schedule import (
    ClaimStage,
    GpuClaim,
    QueueRules,
    SchedulableGpus,
    SchedulingPass,
    queue_order,
)


class GpuLedger:
    def __init__(self, rules: QueueRules | None = None) -> None:
        self.rules = rules or QueueRules()
        self.gpus: tuple[Gpu, ...] = ()
        self._nodes: tuple[NodeGpus, ...] = ()
        self._usable: frozenset[str] = frozenset()
        self._shared: frozenset[str] = frozenset()
        self._failed: frozenset[str] = frozenset()
        self.unclean: set[str] = set()
        self._claims: dict[TaskKey, GpuClaim] = {}
        self._reservations: tuple[GpuReservation, ...] | None = None
        self._running: dict[str, TaskKey] | None = None

    # What is there

    def set_gpus(
        self,
        gpus: Iterable[Gpu],
        *,
        failed: Collection[str] = (),
        unclean: Collection[str] = (),
        shared: Collection[str] = (),
    ) -> None:
        """Set the GPUs as they are now. No job can go on with `failed` ones, `unclean` ones hold memory of
        the last job and are not given to the next yet, `shared` ones are used a little by somebody else."""
        gpus = tuple(gpus)
        if gpus is not self.gpus:
            self.gpus, self._nodes = gpus, group_by_node(gpus)
            self._usable = frozenset(gpu.id for gpu in gpus if gpu.unusable_reason is None)
        self._failed, self.unclean, self._shared = frozenset(failed), set(unclean), frozenset(shared)

    def running_on(self, gpu: str) -> TaskKey | None:
        """The task that runs on it now."""
        if self._running is None:
            running = (claim for claim in self._claims.values() if claim.is_running)
            self._running = {gpu: claim.key for claim in running for gpu in claim.gpus}
        return self._running.get(gpu)

    @property
    def reservations(self) -> tuple[GpuReservation, ...]:
        if self._reservations is None:
            self._reservations = tuple(claim.reservation() for claim in self._claims.values())
        return self._reservations

    @property
    def claims(self) -> list[GpuClaim]:
        return list(self._claims.values())

    def claim(self, key: TaskKey) -> GpuClaim | None:
        return self._claims.get(key)

    def queue(self, now: float) -> list[GpuClaim]:
        """The waiting claims, the next one first."""
        waiting = [claim for claim in self._claims.values() if claim.stage is ClaimStage.WAITING]
        return sorted(waiting, key=lambda claim: queue_order(claim, now, self.rules.patience))

    def reserve(
        self,
        key: TaskKey,
        placement: Placement,
        *,
        now: float,
        priority: float = 0.0,
        lane: NamedLane | None = None,
        others: frozenset[str] | None = None,
    ) -> bool:
        """Keep the placement's GPUs for an offer; return False if one of them is taken or not usable. A job
        keeps what it has, also when it is offered once more. `others` are the nodes in which to find it other
        GPUs if these fail, by default any."""
        known = self._claims.get(key)
        if known is not None and known.kind is ReservationKind.JOB:
            return True
        held_by_others = (held for held in self.reservations if held.key != key)
        calendar = GpuCalendar.from_reservations(held_by_others, now, self.gpus)
        start, until = max(placement.starts_at, now), placement.ends_at
        if not placement.gpus or not all(
            gpu in self._usable and calendar.is_free(gpu, start, until) for gpu in placement.gpus
        ):
            return False
        self._set(
            GpuClaim(
                key=key,
                kind=ReservationKind.OFFER,
                stage=ClaimStage.RESERVED,
                options=(_same_again(placement.gpus, others),),
                since=now,
                until=until,
                priority=_without_nan(priority),
                firm=True,
                lane=lane,
                gpus=placement.gpus,
                starts_at=placement.starts_at,
                duration=until - placement.starts_at,
                latest=until,
            )
        )
        return True

    def restore(
        self, reservation: GpuReservation, *, firm: bool, now: float, others: frozenset[str] | None = None
    ) -> None:
        """Take up a reservation from before a restart, as the store has it: it is not checked again, and
        `schedule` finds it other GPUs, of the nodes `others`, where its own are gone."""
        claim = GpuClaim(
            key=reservation.key,
            kind=reservation.kind,
            stage=ClaimStage.RESERVED,
            options=(_same_again(reservation.gpus, others),),
            since=now,
            until=reservation.ends_at,
            priority=_without_nan(reservation.priority),
            firm=firm,
            gpus=reservation.gpus,
            starts_at=reservation.starts_at,
            duration=max(reservation.ends_at - reservation.starts_at, 0.0) if firm else 0.0,
            latest=FOREVER if reservation.kind is ReservationKind.JOB else reservation.ends_at,
        )
        self._set(claim)

    def renew(self, key: TaskKey, now: float) -> None:
        """The same offer came again: the window begins later, and ends as much later."""
        claim = self._claims.get(key)
        if claim is not None and not claim.is_running:
            claim.begin(now, FOREVER)
            self._set(claim)

    def start(self, key: TaskKey, *, now: float, until: float, priority: float = 0.0) -> None:
        """Make the task a job, which is over at `until` at the latest. GPUs reserved for its offer stay
        reserved, from now on for as long as was planned; without any it joins the queue."""
        claim = self._claims.get(key)
        if claim is None:
            claim = GpuClaim(
                key,
                ReservationKind.JOB,
                ClaimStage.RESERVED,
                (GpuOption(1),),
                now,
                until,
                _without_nan(priority),
            )
        claim.kind = ReservationKind.JOB
        claim.begin(now, until)
        self._set(claim)

    def undo_start(self, key: TaskKey) -> None:
        """Take a `start` back."""
        claim = self._claims.get(key)
        if claim is not None and claim.stage is ClaimStage.RESERVED:
            claim.kind = ReservationKind.OFFER
            self._set(claim)

    def request(
        self,
        key: TaskKey,
        options: Sequence[GpuOption],
        *,
        now: float,
        until: float,
        exclusive: bool = False,
        lane: NamedLane | None = None,
        needs: float = 0.0,
    ) -> None:
        """Put the task into the queue. A job that has GPUs already keeps them until it gets others, if they
        are of any use to it. Its priority is that of its reservation or start. `needs`: seconds that it
        takes; 0: not known."""
        claim = self._claims.get(key)
        if claim is None:
            claim = GpuClaim(key, ReservationKind.JOB, ClaimStage.WAITING, (), now, until)
        if claim.is_running:
            claim.make_firm()
        claim.kind = ReservationKind.JOB
        claim.begin(now, until)
        claim.stage, claim.yielded = ClaimStage.WAITING, False
        claim.options = tuple(dict.fromkeys(option for option in options if option.gpus > 0))
        claim.exclusive, claim.lane, claim.needs = exclusive, lane or claim.lane, needs
        self._set(claim)

    def yield_gpus(self, key: TaskKey) -> bool:
        """Keep no GPU for a job until it requests some. False: nothing has changed."""
        claim = self._claims.get(key)
        if (
            claim is None
            or claim.yielded
            or claim.stage is not ClaimStage.RESERVED
            or claim.kind is ReservationKind.OFFER
        ):
            return False
        claim.yielded = True
        self._set(claim)
        return True

    def blocking_reservations(self, key: TaskKey) -> list[GpuReservation]:
        """The reservations before a waiting task's, of the GPUs that it is to get; all, where it has no
        window yet."""
        mine = self._claims.get(key)
        if mine is None or mine.is_running:
            return []
        wanted = set(mine.gpus) or {gpu.id for gpu in self.gpus}
        before = mine.starts_at if mine.gpus else FOREVER
        return [
            reservation
            for reservation in self.reservations
            if reservation.key != key
            and reservation.starts_at < before
            and not wanted.isdisjoint(reservation.gpus)
        ]

    def leave(self, key: TaskKey) -> None:
        """Leave the queue, or give back what was granted at this very moment. Its window is kept until
        `release`."""
        claim = self._claims.get(key)
        if claim is not None and claim.stage is not ClaimStage.RESERVED:
            if claim.is_running:
                claim.make_firm()
            claim.stage = ClaimStage.RESERVED
            self._set(claim)

    def adopt(self, key: TaskKey, gpus: Sequence[str], *, now: float, until: float) -> bool:
        """Record GPUs that are in use already. False: one of them is gone, or another job's."""
        known = {gpu.id for gpu in self.gpus if gpu.id not in self._failed}
        taken = {
            gpu
            for claim in self._claims.values()
            if claim.is_running and claim.key != key
            for gpu in claim.gpus
        }
        if not gpus or not known.issuperset(gpus) or not taken.isdisjoint(gpus):
            return False
        claim = self._claims.get(key) or GpuClaim(
            key, ReservationKind.JOB, ClaimStage.RUNNING, (_same_again(gpus),), now, until
        )
        claim.kind, claim.stage = ReservationKind.JOB, ClaimStage.RUNNING
        claim.until = min(claim.until, until) if claim.firm else until
        claim.latest = until
        claim.set_window(tuple(gpus), min(claim.starts_at, now) if claim.firm else now)
        self._set(claim)
        return True

    def displaces(self, key: TaskKey) -> bool:
        """Return True if another task, which does not run yet, is to get one of its GPUs."""
        claim = self._claims.get(key)
        has = set(claim.gpus) if claim else set[str]()
        return any(
            not other.is_running and other is not claim and not has.isdisjoint(other.gpus)
            for other in self._claims.values()
        )

    def free_until(self, gpus: Collection[str], now: float) -> float:
        """When others begin to use one of these GPUs, by what the cluster's scheduler knows."""
        starts = (start for gpu in self.gpus if gpu.busy and gpu.id in gpus for start, _ in gpu.busy)
        return min((start for start in starts if start > now), default=FOREVER)

    def extend(self, key: TaskKey, until: float, now: float) -> float:
        """Keep its GPUs until then, or until one of them is reserved for somebody else or others use it, and
        never shorter than so far. Returns until when; `until` itself for an unknown task."""
        claim = self._claims.get(key)
        if claim is None:
            return until
        behind = (
            other.starts_at
            for other in self._claims.values()
            if other is not claim and other.firm and not other.is_running
            if not set(other.gpus).isdisjoint(claim.gpus)
        )
        claim.extend(min(until, min(behind, default=FOREVER), self.free_until(claim.gpus, now)))
        self._set(claim)
        return claim.until

    def release(self, key: TaskKey) -> None:
        if self._claims.pop(key, None) is not None:
            self._reservations = self._running = None

    def schedule(self, now: float) -> list[GpuClaim]:
        """Grant GPUs to every claim whose turn it is; return these claims."""
        for claim in self._claims.values():
            claim.postpone(now)
        state = SchedulableGpus(self._nodes, self._shared, frozenset(self.unclean))
        granted = SchedulingPass(self._claims.values(), state, now, self.rules).granted
        reservations = tuple(claim.reservation() for claim in self._claims.values())
        if reservations != self._reservations:
            self._reservations = reservations
        self._running = None
        return granted

    def _set(self, claim: GpuClaim) -> None:
        self._claims[claim.key] = claim
        self._reservations = self._running = None


def _same_again(gpus: Sequence[str], nodes: frozenset[str] | None = None) -> GpuOption:
    """An option for the same number of GPUs and nodes."""
    return GpuOption(max(len(gpus), 1), nodes, max(len(nodes_of(gpus)), 1))


def _without_nan(priority: float) -> float:
    """NaN would make a queue without an order."""
    return priority if priority == priority else 0.0
