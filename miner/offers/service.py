"""Answer a validator's requests: decide and reserve, write it down, and only then reply.

Deciding and reserving happen in one step without waiting, so the next request sees what the one before
was given: two offers cannot both get the last GPUs. Memory decides; the store is what a restart takes up
again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from core.domain.choices import Refusal
from core.domain.decisions import Decision, Reason
from core.domain.errors import GodMinerError
from core.domain.job_states import EndReason
from core.domain.keys import TaskKey
from core.domain.tasks import TASK_TYPE_OF, ImageModelType, TaskType
from core.domain.wire import (
    MinerSubmission,
    MinerTaskOffer,
    TournamentType,
    TrainingRepoResponse,
    TrainRequestImage,
    TrainRequestText,
)
from miner.chain.auth import Caller
from miner.fleet.fleet import Fleet
from miner.observe.metrics import Metrics
from miner.offers.policy_runtime import CachedDecision, PolicyRuntime
from miner.offers.rules import NO_CAPACITY
from miner.store.jobs import RecordedStart, StartRequest, fail_late_jobs, get_submission
from miner.store.offers import (
    OpenReservation,
    ReceivedOffer,
    RecordedOffer,
    ReservationRow,
    StandingRule,
    lapse_reservations,
    open_reservations,
    record_offer,
    record_offered_start,
)
from miner.store.store import Store
from miner.support.clock import SteadyClock

log = logging.getLogger(__name__)

#: Priority of a start without an accepted offer: behind all others.
LOWEST_PRIORITY = -1e6
#: Seconds for which a repeated offer gets the same refusal.
REFUSAL_SECONDS = 600.0
#: Refusals of a plan that no fact still to be learned about the task will change.
_INFEASIBLE = frozenset({Refusal.NO_TIME, Refusal.NO_MEMORY, Refusal.ABSURD_SIZE, Refusal.NO_ENGINE})


class Reservations:
    """Tasks that have GPUs of the fleet or wait for some: accepted offers, and jobs that are not over."""

    def __init__(self, fleet: Fleet, *, hold_seconds: float) -> None:
        self._fleet = fleet
        self._hold_seconds = hold_seconds
        #: Jobs that are not over.
        self.jobs: set[TaskKey] = set()
        #: Accepted offers, and until when each waits for its start.
        self.holds: dict[TaskKey, float] = {}

    def __contains__(self, key: TaskKey) -> bool:
        return key in self.jobs or key in self.holds

    def restore(self, rows: Iterable[OpenReservation]) -> None:
        """Take up what was reserved before the restart."""
        reservations = list(rows)
        for row, deadline in reservations:
            if deadline is None:
                self.holds[row.hold.key] = row.lapses_at
            else:
                self.jobs.add(row.hold.key)
        self._fleet.restore((row.hold, row.firm) for row, _ in reservations)

    def row_of(self, key: TaskKey) -> ReservationRow | None:
        """The reservation of a task, for the store."""
        claim = self._fleet.ledger.claim(key)
        if claim is None:
            return None
        return ReservationRow(claim.reservation(), claim.firm, self.holds.get(key, claim.until))

    # Offers

    def renew(self, key: TaskKey, now: float) -> bool:
        """Hold an accepted offer's GPUs for as long again; return False if this key's offer holds none."""
        if key not in self.holds:
            return False
        self._fleet.renew(key, now)
        self.holds[key] = now + self._hold_seconds
        return True

    def reserve(self, key: TaskKey, decision: Decision, now: float) -> bool:
        """Hold the GPUs that an accepted offer was decided to get; return False if they are not free."""
        if not self._hold(key, decision):
            return False
        self.holds[key] = now + self._hold_seconds
        return True

    def release(self, key: TaskKey) -> None:
        """Hold nothing for this offer any more; what has become a job meanwhile stays one."""
        if self.holds.pop(key, None) is not None:
            self._fleet.release(key)

    def release_lapsed(self, now: float) -> list[TaskKey]:
        """Release the offers whose start never came; return their keys."""
        lapsed = [key for key, until in self.holds.items() if until <= now]
        for key in lapsed:
            self.release(key)
        return lapsed

    # Starts

    def start(self, key: TaskKey, deadline_at: float, decision: Decision | None) -> None:
        """Make the task a job: with the GPUs reserved for it, or in the queue. `decision`: where no accepted
        offer came first."""
        if decision is not None and decision.accepted:
            self._hold(key, decision)
        if decision is not None or self._fleet.ledger.claim(key) is not None:
            self._fleet.start(key, until=deadline_at, priority=LOWEST_PRIORITY)
        self.holds.pop(key, None)
        self.jobs.add(key)

    def undo_start(self, key: TaskKey, lapses_at: float) -> None:
        """The start of an accepted offer could not be stored: it is an accepted offer still."""
        self.jobs.discard(key)
        self.holds[key] = lapses_at
        self._fleet.ledger.undo_start(key)

    def end_job(self, key: TaskKey) -> None:
        """The job has ended, however. GPUs that a run of it still uses are released when that has ended."""
        self.jobs.discard(key)
        self.holds.pop(key, None)
        claim = self._fleet.ledger.claim(key)
        if claim is not None and not claim.is_running:
            self._fleet.release(key)

    def _hold(self, key: TaskKey, decision: Decision) -> bool:
        placement = decision.placement
        return placement is not None and self._fleet.reserve(
            key, placement, priority=decision.priority, lane=decision.lane
        )


class NoSubmission(GodMinerError):
    code = "no_submission"


class NotEntered(GodMinerError):
    code = "not_entered"


class OfferService:
    def __init__(
        self,
        store: Store,
        policy_runtime: PolicyRuntime,
        fleet: Fleet,
        repos: Mapping[TournamentType, TrainingRepoResponse],
        metrics: Metrics,
        *,
        hold_seconds: float,
        refusal_seconds: float = REFUSAL_SECONDS,
        clock: SteadyClock,
    ) -> None:
        """An accepted offer waits `hold_seconds` for its start. A refusal is repeated for `refusal_seconds`;
        sent again later, the offer is decided again."""
        self._store = store
        self._policies = policy_runtime
        self._fleet = fleet
        self.reservations = Reservations(fleet, hold_seconds=hold_seconds)
        self._repos = repos
        self._metrics = metrics
        self._refusal_seconds = refusal_seconds
        self._clock = clock
        #: Called with the job's number for every start that is in the store. Must not wait.
        self.on_started: Callable[[int], None] | None = None

    def _now(self) -> float:
        """A request that was let in carries a time near ours: that settles which time it is."""
        self._clock.confirm()
        return self._clock()

    def restore(self) -> None:
        """Take up what was reserved before the restart."""
        self.reservations.restore(self._store.read_now(open_reservations))

    async def expire(self, now: float) -> None:
        """Release the offers whose start never came, and end the jobs whose deadline has passed."""
        if lapsed := self.reservations.release_lapsed(now):
            await self._store.write(lapse_reservations, lapsed, now)
        for key in await self._store.write(fail_late_jobs, now):
            self.reservations.end_job(key)

    # Offers

    async def offer(self, caller: Caller, offer: MinerTaskOffer, raw: bytes) -> Decision:
        key, now = TaskKey(caller.hotkey, offer.task_id), self._now()
        reservations, was_reserved = self.reservations, key in self.reservations
        decided = None
        if not reservations.renew(key, now):  # an accepted offer that is held needs no other decision
            decided = self._policies.decide(offer, now, self._fleet.snapshot(now, without=key))
            accepted = decided.decision.accepted and not was_reserved  # a job keeps what it has
            if accepted and not reservations.reserve(key, decided.decision, now):
                decided = CachedDecision(_overbooked(decided.decision))
        try:
            recorded = await caller.ticket.write(
                record_offer,
                ReceivedOffer(caller.hotkey, offer, raw, now),
                decided.decision if decided else None,
                reservations.row_of(key) if key in reservations.holds else None,
                StandingRule(was_reserved, self._refusal_seconds),
                decision_id=decided.decision_id if decided else None,
            )
        except BaseException:
            if not was_reserved:
                reservations.release(key)
            raise
        if decided is not None:
            decided.decision_id = recorded.decision_id or decided.decision_id
        if not recorded.decision.accepted and not was_reserved:
            reservations.release(key)  # an earlier refusal stands
        self._log_offer(caller, offer, recorded)
        return recorded.decision

    def _log_offer(self, caller: Caller, offer: MinerTaskOffer, recorded: RecordedOffer) -> None:
        accepted = recorded.decision.accepted
        self._metrics.count_offer(accepted=accepted)
        log.info(
            "offer %s: %s of %s for %g h from %s%s",
            "accepted" if accepted else "refused",
            offer.task_type,
            offer.model,
            offer.hours_to_complete,
            caller.hotkey,
            " (repeated)" if recorded.repeated else "",
            extra={"task_id": offer.task_id},
        )

    # Starts

    async def start_text(self, caller: Caller, request: TrainRequestText, raw: bytes) -> RecordedStart:
        return await self._start(caller, request, TASK_TYPE_OF[request.dataset_type.kind], None, raw)

    async def start_image(self, caller: Caller, request: TrainRequestImage, raw: bytes) -> RecordedStart:
        return await self._start(caller, request, TaskType.IMAGE, request.model_type, raw)

    async def _start(
        self,
        caller: Caller,
        request: TrainRequestText | TrainRequestImage,
        task_type: TaskType,
        image_type: ImageModelType | None,
        raw: bytes,
    ) -> RecordedStart:
        key, now = TaskKey(caller.hotkey, request.task_id), self._now()
        start = StartRequest(
            task_id=request.task_id,
            task_type=task_type,
            model=request.model,
            hours=request.hours_to_complete,
            expected_repo_name=request.expected_repo_name,
            # The validator's clock runs from before it called; ours may be ahead of its own.
            started_at=min(caller.at, now),
            request=raw,
        )
        started = await self._record_start(caller, key, start, image_type, now)
        if started.state.is_over:
            self.reservations.end_job(key)
        if self.on_started is not None:  # also for a job that is done: it may get another repository name
            self.on_started(started.job_id)
        self._log_start(caller, start, started)
        return started

    async def _record_start(
        self, caller: Caller, key: TaskKey, start: StartRequest, image_type: ImageModelType | None, now: float
    ) -> RecordedStart:
        reservations, lapses_at = self.reservations, self.reservations.holds.get(key)
        decision = infeasible = None
        if key not in reservations:
            decision, infeasible = self._decide_start(key, start, image_type, now)
        if infeasible is None:
            reservations.start(key, start.deadline_at, decision)
        try:
            return await caller.ticket.write(
                record_offered_start,
                caller.hotkey,
                start,
                reservations.row_of(key) if infeasible is None else None,
                now=now,
                decision=decision,
                infeasible=infeasible,
            )
        except BaseException:
            if lapses_at is not None:
                reservations.undo_start(key, lapses_at)
            elif decision is not None:
                reservations.end_job(key)
            raise

    def _decide_start(
        self, key: TaskKey, start: StartRequest, image_type: ImageModelType | None, now: float
    ) -> tuple[Decision, EndReason | None]:
        """Decide about a start that no accepted offer went before, as if it were offered now with the hours
        that are left; also why it is infeasible, if it is."""
        offer = MinerTaskOffer(
            model=start.model,
            hours_to_complete=max(start.deadline_at - now, 0.0) / 3600,
            task_id=start.task_id,
            task_type=start.task_type,
        )
        fleet = self._fleet.snapshot(now, without=key)
        decision = self._policies.decide(offer, now, fleet, image_type).decision
        if decision.plan is None and decision.refusal is None:
            # All GPUs are held for longer than an offer may wait. A start waits until its deadline.
            on_idle = self._policies.decide(offer, now, replace(fleet, reservations=()), image_type).decision
            if (reason := self._infeasible_reason(start, on_idle, now)) is not None:
                return on_idle, reason
        return decision, self._infeasible_reason(start, decision, now)

    def _infeasible_reason(self, start: StartRequest, decision: Decision, now: float) -> EndReason | None:
        """Give up a start only when no training could succeed: a miner named for a task is scored for it
        whatever it answers."""
        if start.deadline_at <= now:
            return EndReason.DEADLINE
        if decision.accepted or decision.refusal not in _INFEASIBLE:
            return None
        if decision.refusal is Refusal.NO_MEMORY and any(
            gpu.unusable_reason is not None for gpu in self._fleet.inventory.gpus
        ):
            return None  # more GPUs may be back in time
        return EndReason.INFEASIBLE

    def _log_start(self, caller: Caller, start: StartRequest, started: RecordedStart) -> None:
        what = "repeated" if started.repeated else "taken"
        if started.differs:
            what = "repeated with another type, model or data, which is not taken over"
        self._metrics.starts.labels("repeated" if started.repeated else "new").inc()
        log.info(
            "start %s: %s of %s for %s, repository %s, deadline in %.2f h",
            f"given up, {started.end_reason}" if started.end_reason else what,
            start.task_type,
            start.model,
            caller.hotkey,
            start.expected_repo_name,
            (start.deadline_at - self._clock()) / 3600,
            extra={"task_id": start.task_id, "job_id": started.job_id},
        )

    # Submissions and tournaments

    async def submission(self, caller: Caller, task_id: str) -> MinerSubmission:
        key = TaskKey(caller.hotkey, task_id)
        submission = await caller.ticket.write(get_submission, key)
        if submission is None:
            raise NoSubmission(f"nothing is published for task {task_id!r} yet")
        return submission

    def training_repo(self, task_type: TournamentType) -> TrainingRepoResponse:
        repo = self._repos.get(task_type)
        if repo is None:
            raise NotEntered(f"this miner does not enter {task_type} tournaments")
        return repo


def _overbooked(decision: Decision) -> Decision:
    """Refuse after all. The decision was made on a snapshot of the same instant, so only a mistake of ours
    leads here; it must not become an acceptance that cannot be kept."""
    log.error("the place chosen for an offer is not free: %s", decision.placement)
    reason = Reason("gpus", False, f"the place chosen is not free after all: {decision.placement}")
    reasons = (*decision.reasons, reason)
    return replace(decision, accepted=False, message=f"Not taken: {NO_CAPACITY}", reasons=reasons)
