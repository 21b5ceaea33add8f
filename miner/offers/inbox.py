"""What the daemon does with a validator's request once it is known to be one.

Decide and hold, which is `Promises`' and takes no time; write it down; and only then answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from core.errors import GodMinerError
from core.tasks import TASK_TYPE_OF, ImageModelType, TaskType
from core.wire import (
    MinerSubmission,
    MinerTaskOffer,
    TournamentType,
    TrainingRepoResponse,
    TrainRequestImage,
    TrainRequestText,
)
from miner.auth import Caller
from miner.clock import SteadyClock
from miner.fleet.base import TaskKey
from miner.metrics import Metrics
from miner.offers.decision import Decision
from miner.offers.promises import Promises
from miner.store.books import Books
from miner.store.jobs import Start, Started
from miner.store.offers import Recorded

log = logging.getLogger(__name__)


class NoSubmission(GodMinerError):
    code = "no_submission"


class NotEntered(GodMinerError):
    code = "not_entered"


class Inbox:
    def __init__(
        self,
        books: Books,
        promises: Promises,
        repos: Mapping[TournamentType, TrainingRepoResponse],
        metrics: Metrics,
        *,
        refusal_seconds: float,
        clock: SteadyClock,
    ) -> None:
        """A refusal is repeated for `refusal_seconds`; asked for again later, the offer is decided anew."""
        self._books = books
        self.promises = promises
        self._repos = repos
        self._metrics = metrics
        self._refusal_seconds = refusal_seconds
        self._clock = clock
        #: Hears of every start that is in the books, by the job's number. Must not wait.
        self.on_started: Callable[[int], None] | None = None

    def _time(self) -> float:
        """A request that was let in carries a time near ours: that settles which time it is."""
        self._clock.confirm()
        return self._clock()

    def load(self) -> None:
        """Take up what earlier lives of this daemon have promised."""
        self.promises.restore(self._books.taken())

    # Offers

    async def offer(self, caller: Caller, offer: MinerTaskOffer, raw: bytes) -> Decision:
        key, now = TaskKey(caller.hotkey, offer.task_id), self._time()
        promises, was_promised = self.promises, key in self.promises
        answer = promises.offered(key, offer, now)
        try:
            recorded = await self._books.record_offer(
                caller.hotkey,
                offer,
                raw,
                answer.decision if answer else None,
                promises.place(key) if key in promises.holds else None,
                now=now,
                is_kept=was_promised,
                refusal_stands_for=self._refusal_seconds,
                shared=answer.row if answer else None,
                through=caller.ticket.submit,
            )
        except BaseException:
            if not was_promised:
                promises.give_up(key)
            raise
        if answer is not None:
            answer.row = recorded.decision_id or answer.row
        if not recorded.decision.accepted and not was_promised:
            promises.give_up(key)  # an earlier refusal stands
        self._note_offer(caller, offer, recorded)
        return recorded.decision

    def _note_offer(self, caller: Caller, offer: MinerTaskOffer, recorded: Recorded) -> None:
        accepted = recorded.decision.accepted
        self._metrics.offer(accepted=accepted)
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

    async def start_text(self, caller: Caller, request: TrainRequestText, raw: bytes) -> Started:
        return await self._start(caller, request, TASK_TYPE_OF[request.dataset_type.kind], None, raw)

    async def start_image(self, caller: Caller, request: TrainRequestImage, raw: bytes) -> Started:
        return await self._start(caller, request, TaskType.IMAGE, request.model_type, raw)

    async def _start(
        self,
        caller: Caller,
        request: TrainRequestText | TrainRequestImage,
        task_type: TaskType,
        image_type: ImageModelType | None,
        raw: bytes,
    ) -> Started:
        key, now = TaskKey(caller.hotkey, request.task_id), self._time()
        start = Start(
            task_id=request.task_id,
            task_type=task_type,
            model=request.model,
            hours=request.hours_to_complete,
            expected_repo_name=request.expected_repo_name,
            # The validator's clock runs from before it called; ours may be ahead of its own.
            started_at=min(caller.at, now),
            request=raw,
        )
        started = await self._store_start(caller, key, start, image_type, now)
        if started.state.is_over:
            self.promises.over(key)
        if self.on_started is not None:  # also of a job that is done: it may want another name
            self.on_started(started.job_id)
        self._note_start(caller, start, started)
        return started

    async def _store_start(
        self, caller: Caller, key: TaskKey, start: Start, image_type: ImageModelType | None, now: float
    ) -> Started:
        promises, lapses_at = self.promises, self.promises.holds.get(key)
        decision = hopeless = None
        if key not in promises:
            decision, hopeless = promises.judge(key, start, image_type, now)
        if hopeless is None:
            promises.started(key, start, decision)
        try:
            return await self._books.record_start(
                caller.hotkey,
                start,
                promises.place(key) if hopeless is None else None,
                now=now,
                decision=decision,
                hopeless=hopeless,
                through=caller.ticket.submit,
            )
        except BaseException:
            if lapses_at is not None:
                promises.not_started(key, lapses_at)
            elif decision is not None:
                promises.over(key)
            raise

    def _note_start(self, caller: Caller, start: Start, started: Started) -> None:
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

    # What else they ask for

    async def submission(self, caller: Caller, task_id: str) -> MinerSubmission:
        key = TaskKey(caller.hotkey, task_id)
        found = await self._books.submission(key, through=caller.ticket.submit)
        if found is None:
            raise NoSubmission(f"nothing is published for task {task_id!r} yet")
        return found

    def training_repo(self, task_type: TournamentType) -> TrainingRepoResponse:
        repo = self._repos.get(task_type)
        if repo is None:
            raise NotEntered(f"this miner does not enter {task_type} tournaments")
        return repo

    # What time brings

    async def settle(self, now: float) -> None:
        """Give up the offers whose start never came, and the jobs whose deadline has passed."""
        if lapsed := self.promises.lapse(now):
            await self._books.lapse(lapsed, now)
        for key in await self._books.fail_late(now):
            self.promises.over(key)
