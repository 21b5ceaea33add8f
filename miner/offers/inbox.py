"""What the daemon does with a validator's request once it is known to be one.

Between the policy, which is pure, and the books, which are only written: keeps track of what is promised,
and of nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from core.errors import GodMinerError
from core.tasks import TASK_TYPE_OF, TaskType
from core.wire import (
    MinerSubmission,
    MinerTaskOffer,
    TournamentType,
    TrainingRepoResponse,
    TrainRequestImage,
    TrainRequestText,
)
from miner.auth import Caller
from miner.metrics import Metrics
from miner.offers.decision import Decision, Load, Policy
from miner.store.books import Books, Freed
from miner.store.jobs import Start, Started

log = logging.getLogger(__name__)


class NoSubmission(GodMinerError):
    code = "no_submission"


class NotEntered(GodMinerError):
    code = "not_entered"


class Promises:
    """Tasks that take up a place: open jobs, and accepted offers whose start has not come yet. A task takes
    one place, also when two validators named it."""

    def __init__(self) -> None:
        self.jobs: set[str] = set()
        self.holds: set[str] = set()

    def load_without(self, task_id: str) -> Load:
        return Load(len(self.jobs - {task_id}), len(self.holds - self.jobs - {task_id}))

    def free(self, freed: Freed) -> None:
        self.jobs.difference_update(freed.jobs)
        self.holds.difference_update(freed.holds)

    def start(self, task_id: str) -> None:
        self.holds.discard(task_id)
        self.jobs.add(task_id)


class Inbox:
    def __init__(
        self,
        books: Books,
        policy: Policy,
        repos: Mapping[TournamentType, TrainingRepoResponse],
        metrics: Metrics,
        *,
        hold_seconds: float,
    ) -> None:
        self._books = books
        self._policy = policy
        self._repos = repos
        self._metrics = metrics
        self._hold_seconds = hold_seconds
        self.promises = Promises()

    def load(self) -> None:
        """Take up what earlier lives of this daemon have promised."""
        known = self._books.commitments()
        self.promises.jobs = {entry.task_id for entry in known.jobs}
        self.promises.holds = {entry.task_id for entry in known.holds}

    async def offer(self, caller: Caller, offer: MinerTaskOffer, raw: bytes) -> Decision:
        """Decide, hold the place in the same instant, store, and only then answer."""
        task_id, promises = offer.task_id, self.promises
        promised = task_id in promises.holds or task_id in promises.jobs
        decision = self._policy.decide(offer, promises.load_without(task_id))
        if decision.accepted and not promised:
            promises.holds.add(task_id)
        try:
            recorded = await self._books.record_offer(
                caller.hotkey,
                offer,
                raw,
                decision,
                hold_seconds=self._hold_seconds,
                through=caller.ticket.submit,
            )
        except BaseException:
            if decision.accepted and not promised:
                promises.holds.discard(task_id)
            raise
        stands = recorded.decision
        if recorded.holds:
            promises.holds.add(task_id)  # also for a first answer whose hold had lapsed: it is promised again
        elif not promised:
            promises.holds.discard(task_id)
        self._metrics.offer(accepted=stands.accepted)
        log.info(
            "offer %s: %s of %s for %g h from %s%s",
            "accepted" if stands.accepted else "refused",
            offer.task_type,
            offer.model,
            offer.hours_to_complete,
            caller.hotkey,
            " (repeated)" if recorded.repeated else "",
            extra={"task_id": task_id},
        )
        return stands

    async def start_text(self, caller: Caller, request: TrainRequestText, raw: bytes) -> Started:
        return await self._start(caller, request, TASK_TYPE_OF[request.dataset_type.kind], raw)

    async def start_image(self, caller: Caller, request: TrainRequestImage, raw: bytes) -> Started:
        return await self._start(caller, request, TaskType.IMAGE, raw)

    async def _start(
        self, caller: Caller, request: TrainRequestText | TrainRequestImage, task_type: TaskType, raw: bytes
    ) -> Started:
        start = Start(
            task_id=request.task_id,
            task_type=task_type,
            model=request.model,
            hours=request.hours_to_complete,
            expected_repo_name=request.expected_repo_name,
            # The validator's clock runs from before it called; ours may be ahead of its own.
            started_at=min(caller.at, time.time()),
            request=raw,
        )
        started = await self._books.record_start(caller.hotkey, start, through=caller.ticket.submit)
        if started.state.is_over:
            self.promises.holds.discard(request.task_id)  # or that place would be held for good
        else:
            self.promises.start(request.task_id)
        self._metrics.starts.labels("repeated" if started.repeated else "new").inc()
        log.info(
            "start %s: %s of %s, repository %s, deadline in %.2f h",
            "repeated" if started.repeated else "taken",
            task_type,
            request.model,
            request.expected_repo_name,
            (start.deadline_at - time.time()) / 3600,
            extra={"task_id": request.task_id, "job_id": started.job_id},
        )
        return started

    async def submission(self, caller: Caller, task_id: str) -> MinerSubmission:
        found = await self._books.submission(task_id, through=caller.ticket.submit)
        if found is None:
            raise NoSubmission(f"nothing is published for task {task_id!r} yet")
        return found

    def training_repo(self, task_type: TournamentType) -> TrainingRepoResponse:
        repo = self._repos.get(task_type)
        if repo is None:
            raise NotEntered(f"this miner does not enter {task_type} tournaments")
        return repo

    async def settle(self, now: float) -> None:
        """Free what time has ended."""
        self.promises.free(await self._books.settle(now))
