"""State that all steps of one job share: its row, directory, GPUs, display state and retries."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import TypeVar

from core.domain.decisions import IDLE_HOST, TrainingWorth
from core.domain.job_states import END_MEANINGS, EndReason, JobState, RetryRule, StepFailed
from core.domain.keys import TaskKey
from core.domain.tasks import ImageModelType
from core.domain.wire import MinerTaskOffer
from core.profile.resolve import LoadedProfile, load_profile
from miner.api.jobs import LiveJob
from miner.backends.base import Backend
from miner.backends.trial import BackendTrials
from miner.fleet.base import FleetSnapshot, GpuGrant
from miner.fleet.fleet import Fleet
from miner.fleet.sampler import SampleHistory
from miner.inputs.fetch import FetchedInputs, InputsProvider, JobTask
from miner.jobs.events import JobEventBus
from miner.jobs.figures import RunFigures
from miner.jobs.folder import FinishedJobCleaner, JobFolder, job_folder
from miner.jobs.running_training import RunningTraining
from miner.jobs.tasks import job_task_of
from miner.jobs.timeline import JobTimeline, JobTimings, job_timeline
from miner.observe.alerts import STEP_FAILURES, AlertKind, SendAlert, job_subject
from miner.publish.publisher import SubmissionPublisher
from miner.store import attempts as store_attempts
from miner.store import jobs as store_jobs
from miner.store.attempts import AttemptRow
from miner.store.jobs import JobRow
from miner.store.store import Store

log = logging.getLogger(__name__)

T = TypeVar("T")

#: The worth of a task on a fleet, and of its GPUs to others, as if it were offered now.
WorthOfTask = Callable[[MinerTaskOffer, ImageModelType | None, FleetSnapshot, float], TrainingWorth]


@dataclass(frozen=True)
class JobServices:
    """Services that all job workers share."""

    data_dir: Path
    store: Store
    #: By backend name, as in BACKEND.
    backends: Mapping[str, Backend]
    fleet: Fleet
    inputs: InputsProvider
    publisher: SubmissionPublisher
    #: Returns the profile as its files are now.
    profile: Callable[[], LoadedProfile]
    cleaner: FinishedJobCleaner
    #: Trials of what each image of a backend can train, by the same names.
    trials: Mapping[str, BackendTrials]
    alert: SendAlert
    #: Loads another one that the operator names for a task.
    named_profile: Callable[[str], LoadedProfile] = load_profile
    worth: WorthOfTask = lambda *_: IDLE_HOST
    #: Samples of the GPUs of the last hour; empty if nothing measures them.
    samples: SampleHistory = field(default_factory=SampleHistory)
    timings: JobTimings = field(default_factory=JobTimings)
    events: JobEventBus = field(default_factory=JobEventBus)
    clock: Callable[[], float] = time.time
    random: Random = field(default_factory=Random)
    #: Backends of earlier choices that still have runs of ours.
    other_backends: Sequence[Backend] = ()
    #: Ports that running attempts were given, by job.
    ports: dict[int, int] = field(default_factory=dict)
    #: The ids of the jobs that have a worker.
    job_ids: dict[TaskKey, int] = field(default_factory=dict)

    @property
    def all_backends(self) -> tuple[Backend, ...]:
        return (*self.backends.values(), *self.other_backends)

    def backend_of(self, attempt: AttemptRow) -> Backend:
        """The backend that runs the attempt."""
        named = (backend for backend in self.all_backends if backend.name == attempt.backend)
        return next(named, self.all_backends[0])

    def backend_for(self, gpus: Sequence[str]) -> Backend:
        """The backend that runs trainings on these GPUs."""
        node = self.fleet.inventory.node_with(gpus)
        return self.backends[node.backend] if node else self.all_backends[0]


class _StepTimedOut(StepFailed):
    """The deadline of a step has passed."""


class JobContext:
    """The job's row as last read, its directory, its GPUs and its display state."""

    def __init__(self, services: JobServices, row: JobRow) -> None:
        self.services = services
        self.row = row
        self.folder: JobFolder = job_folder(services.data_dir, row.id)
        self.live = LiveJob(row.id, row.task_id, row.state)
        #: Figures of the running attempt.
        self.figures: RunFigures | None = None
        self.fetched: FetchedInputs | None = None
        self.grant: GpuGrant | None = None
        #: The attempt that runs now, and can be asked to change.
        self.training: RunningTraining | None = None
        #: The reason why a GPU of this job cannot be used any more.
        self.gpu_lost: str | None = None
        #: Set when something has changed that a waiting worker should look at.
        self.woken = asyncio.Event()
        #: The last submit to the backend, perhaps still under way.
        self.pending_submit: asyncio.Future[str] | None = None
        self._last_shown: dict[str, object] = {}
        self.show_state()

    @property
    def key(self) -> TaskKey:
        return TaskKey(self.row.validator, self.row.task_id)

    @property
    def task(self) -> JobTask:
        """The task as the newest start asks for it; `StepFailed` if the stored request is invalid."""
        return job_task_of(self.row, self.folder)

    @property
    def log(self) -> Mapping[str, object]:
        """Fields for `extra=`."""
        return {"task_id": self.row.task_id, "job_id": self.row.id}

    def now(self) -> float:
        return self.services.clock()

    def deadline(self) -> float:
        """The job's deadline as last read: a later start may extend it."""
        return self.row.deadline_at

    def useful_until(self) -> float:
        """The last moment at which a training can still lead to a model that is published in time."""
        return self.timeline().end_by

    def timeline(self, *, reserve_s: float = 0.0, publish_s: float = 60.0) -> JobTimeline:
        """The job's time limits, including those that have passed."""
        row = self.row
        return job_timeline(
            row.started_at, row.deadline_at, self.services.timings, reserve_s=reserve_s, publish_s=publish_s
        )

    async def reload(self) -> None:
        self.row = await self.services.store.read(store_jobs.get_job, self.row.id)
        self.show_state()

    async def attempts(self) -> list[AttemptRow]:
        return await self.services.store.read(store_attempts.attempts_of, self.row.id)

    async def move(self, state: JobState, reason: EndReason | None = None, detail: str = "") -> None:
        self.row = await self.services.store.write(
            store_attempts.set_job_state,
            self.row.id,
            self.row.lock_token,
            state,
            self.now(),
            reason=reason,
            detail=detail,
        )
        text = f" ({reason}{': ' + detail if detail else ''})" if reason else ""
        log.info("job %d is %s%s", self.row.id, state, text, extra=self.log)
        went_wrong = reason is not None and reason is not EndReason.PUBLISHED
        self.live.stage, self.live.trouble, self.live.retry_at = "", detail if went_wrong else "", None
        self.show_state()

    def show_state(self) -> None:
        """Send the job's state to the displays if it has changed."""
        live, row = self.live, self.row
        live.state, live.deadline_at = row.state.value, row.deadline_at
        live.published = row.submission.repo if row.submission else None
        live.gpus = self.grant.ids if self.grant else ()
        state = asdict(live)
        if state != self._last_shown:
            self._last_shown = state
            self.services.events.send("job", row.id, state)

    def note(self, kind: str, text: str) -> None:
        """Write something for the operator to the log and the displays."""
        log.info("job %d: %s", self.row.id, text, extra=self.log)
        self.services.events.send("note", self.row.id, {"job_id": self.row.id, "kind": kind, "text": text})

    def alert(self, kind: AlertKind, text: str) -> None:
        """Raise an alert about this job."""
        self.services.alert(kind, text, job_subject(self.row.id))

    def set_stage(self, stage: str, done: int | None = None, total: int | None = None) -> None:
        """Show what is being done."""
        self.live.stage, self.live.bytes_done, self.live.bytes_total = stage, done, total
        self.show_state()

    async def wait_until_submitted(self) -> None:
        """Wait for a submit under way: a run that the backend does not know then, it will never know."""
        if self.pending_submit is not None:
            await asyncio.wait({self.pending_submit})
            self.pending_submit = None

    async def pause(self, seconds: float) -> None:
        """Wait this long, or until `woken` is set."""
        try:
            async with asyncio.timeout(max(seconds, 0.0)):
                await self.woken.wait()
        except TimeoutError:
            pass
        self.woken.clear()

    def adopt_gpus(self, gpus: tuple[str, ...]) -> None:
        """After a restart: reserve the GPUs that a run still uses.

        While the fleet does not see its GPUs this is tried again: a GPU that is not seen yet is not lost.
        """
        if self.grant is not None or self.gpu_lost is not None:
            return
        fleet = self.services.fleet
        self.grant = fleet.adopt(self.key, gpus, until=self.row.deadline_at)
        seen = fleet.inventory
        if self.grant is None and seen.gpus and seen.problem is None:
            self.gpu_lost = f"of {', '.join(gpus)} not all can be used any more"

    def release_gpus(self) -> None:
        self.services.fleet.release(self.key)
        self.services.ports.pop(self.row.id, None)
        self.grant = None
        self.gpu_lost = None
        self.show_state()

    async def run_step(
        self,
        name: str,
        action: Callable[[], Awaitable[T]],
        until: Callable[[], float],
        attempt: int | None = None,
    ) -> T:
        """Run a step, with retries as its failure's reason allows, until `until()`.

        A later start request may extend that deadline. `StepFailed` when the step has failed for good.
        """
        failures, last = 0, ""
        while True:
            try:
                return await self._try_step(name, action, until(), attempt)
            except StepFailed as failed:
                if isinstance(failed, _StepTimedOut) and self.now() < until():
                    continue  # a second start has extended it meanwhile
                if failed.reason is EndReason.DEADLINE:
                    raise StepFailed(failed.reason, f"{failed}{last}") from None
                if END_MEANINGS[failed.reason].retry is not RetryRule.WAIT:
                    raise
                failures, last = failures + 1, f"; the last try: {failed}"
                pause = max(
                    self.services.timings.pause(failures, self.services.random), failed.retry_after or 0.0
                )
                if self.now() + pause >= until():
                    raise StepFailed(EndReason.DEADLINE, f"{name} was not over in time{last}") from None
                if failed.reason is EndReason.DISK_FULL:
                    await self.services.cleaner.remove_all_finished()
                await self._wait_to_retry(name, failed, failures, pause)

    async def _try_step(
        self, name: str, action: Callable[[], Awaitable[T]], until: float, attempt: int | None
    ) -> T:
        async with self.record_step(name, attempt):
            try:
                async with asyncio.timeout(max(until - self.now(), 0.0)) as limit:
                    return await action()
            except TimeoutError:
                if not limit.expired():
                    raise
                raise _StepTimedOut(EndReason.DEADLINE, f"{name} was not over in time") from None

    @asynccontextmanager
    async def record_step(self, name: str, attempt: int | None = None) -> AsyncIterator[None]:
        """Store when a step begins and how it ends. A step that the daemon's own end cuts short has no end:
        after the restart it is marked as interrupted."""
        store, row = self.services.store, self.row
        step_id = await store.write(
            store_attempts.begin_step, row.id, row.lock_token, name, attempt, self.now()
        )
        outcome, detail = "ok", ""
        try:
            yield
        except StepFailed as failed:
            outcome, detail = failed.reason.value, str(failed)
            raise
        except asyncio.CancelledError:
            outcome = ""
            raise
        except Exception as error:
            outcome, detail = EndReason.BUG.value, f"{type(error).__name__}: {error}"
            raise
        finally:
            if outcome:
                await store.write(store_attempts.end_step, step_id, outcome, detail, self.now())

    async def _wait_to_retry(self, name: str, failed: StepFailed, failures: int, pause: float) -> None:
        log.warning(
            "job %d: %s failed (%s: %s); try %d in %.1f s",
            self.row.id,
            name,
            failed.reason,
            str(failed),
            failures + 1,
            pause,
            extra=self.log,
        )
        if failures == 3:
            self.alert(STEP_FAILURES[failed.reason], f"{name}: {failed}")
        self.live.trouble, self.live.retry_at = str(failed), self.now() + pause
        self.show_state()
        await self.pause(pause)
        self.live.trouble, self.live.retry_at = "", None
