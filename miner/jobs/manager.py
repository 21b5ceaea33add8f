"""All jobs of this daemon: one worker for each job that needs one, and what others may ask of a job.

Start, cancel, retry and the take-up after a restart all go through `JobManager`.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable

from core.domain.errors import GodMinerError
from core.domain.job_states import EndReason, JobState
from core.domain.keys import TaskKey
from miner.api.jobs import LiveJob
from miner.backends.base import Backend, BackendRun, BackendUnreachable, RunPhase
from miner.jobs.backend_ability import watch_backend
from miner.jobs.context import JobContext, JobServices
from miner.jobs.figures import RunFigures
from miner.jobs.running_training import RunningTraining
from miner.jobs.timeline import JobTimings
from miner.jobs.worker import JobWorker
from miner.observe.alerts import AlertKind
from miner.store import attempts
from miner.store import jobs as store_jobs
from miner.store.attempts import AttemptRow, StaleJob, retry_job, set_job_state
from miner.store.database import StoreUnavailable
from miner.store.jobs import JobRow, RecordedStart, StartRequest, get_job, record_start
from miner.store.store import Store

log = logging.getLogger(__name__)

#: Tries to cancel a job whose row keeps changing.
_CANCEL_TRIES = 20
#: Jobs that are taken up before others have their turn.
ADOPTED_AT_A_TIME = 50
#: Between two searches for orphaned runs.
SWEEP_SECONDS = 1800.0


class JobStateConflict(GodMinerError):
    """The job's state does not allow what was requested."""

    code = "job_state"


class JobsNotReady(GodMinerError):
    """Jobs cannot be started before there is a backend."""

    code = "no_jobs_yet"


async def cancel_in_store(store: Store, job_id: int, clock: Callable[[], float]) -> JobRow:
    """Cancel the job; its worker ends it, now or once there is a backend again."""
    for _ in range(_CANCEL_TRIES):
        row = await store.read(get_job, job_id)
        if row.state.is_over:
            raise JobStateConflict(f"job {job_id} is over already ({row.state}); there is nothing to cancel")
        try:
            row = await store.write(
                set_job_state,
                job_id,
                row.lock_token,
                JobState.CANCELLED,
                clock(),
                reason=EndReason.CANCELLED,
            )
        except StaleJob:
            continue
        log.info("job %d is cancelled", job_id, extra={"task_id": row.task_id, "job_id": job_id})
        return row
    raise JobStateConflict(f"job {job_id} keeps changing; try again")


def _ignore(_key: TaskKey) -> None:
    return None


class JobManager:
    def __init__(self, services: JobServices) -> None:
        self.services = services
        #: Called with the key of each task that is taken without an offer, and of each job that is over.
        self.on_taken: Callable[[TaskKey], None] = _ignore
        self.on_over: Callable[[TaskKey], None] = _ignore
        self._contexts: dict[int, JobContext] = {}
        self._workers: dict[int, asyncio.Task[None]] = {}
        self._background: list[asyncio.Task[None]] = []
        self._being_replaced: set[int] = set()
        self._stopping = False
        self._ready = asyncio.Event()

    # Starting and stopping with the daemon

    async def start(self) -> None:
        """Take up the jobs of an earlier daemon, whose runs have gone on meanwhile."""
        self.services.fleet.on_lost(self._gpu_lost)
        for row, held in await adopt_open_jobs(self.services):
            self._start_worker(row, held)
        self._ready.set()
        self._background = [
            asyncio.create_task(sweep_orphans_forever(self.services), name="orphans"),
            *(
                asyncio.create_task(watch_backend(self.services, name), name=f"watch {name}")
                for name in self.services.backends
            ),
        ]

    async def stop(self) -> None:
        """Stop all workers. Trainings go on without them; uploads go on after the restart."""
        self._stopping = True
        self.services.events.close()
        self._ready.set()
        tasks = [*self._workers.values(), *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Stop, and close the backends."""
        await self.stop()
        for backend in self.services.all_backends:
            await backend.close()

    # Requests

    async def start_own(self, start: StartRequest, validator: str) -> RecordedStart:
        """Record and start a task that no validator has sent."""
        self.on_taken(TaskKey(validator, start.task_id))
        started = await self.services.store.write(record_start, validator, start, self.services.clock())
        await self.started(started.job_id)
        return started

    async def started(self, job_id: int) -> None:
        """A start was recorded: of a new job, or of a known one with another name or deadline."""
        await self._ready.wait()  # a new job must not take the GPUs of one that is not adopted yet
        row = await self._row_between_workers(job_id)
        context = self._contexts.get(job_id)
        if context is None:
            self._start_worker(row)
            return
        await context.reload()
        context.woken.set()

    async def _row_between_workers(self, job_id: int) -> JobRow:
        """Load the job's row when it is certain whether it has a worker: two would launch twice."""
        while True:
            row = await self._load(job_id)
            if job_id not in self._being_replaced:
                return row
            await asyncio.sleep(0.01)

    async def cancel(self, job_id: int) -> JobRow:
        """End the job. What is published stays."""
        row = await cancel_in_store(self.services.store, job_id, self.services.clock)
        await self._replace_worker(row)
        return row

    async def retry(self, job_id: int) -> JobRow:
        """Start a failed or cancelled job again, while there is time."""
        row = await self._load(job_id)
        if row.state not in (JobState.FAILED, JobState.CANCELLED):
            raise JobStateConflict(
                f"job {job_id} is {row.state}; only a failed or cancelled one can be tried again"
            )
        now = self.services.clock()
        if row.deadline_at <= now:
            raise JobStateConflict(f"the deadline of job {job_id} has passed; it is too late to try again")
        row = await self.services.store.write(retry_job, job_id, row.lock_token, now)
        await self.started(job_id)
        return row

    def live(self, job_id: int) -> LiveJob | None:
        context = self._contexts.get(job_id)
        return context.live if context else None

    def figures(self, job_id: int) -> RunFigures | None:
        """Figures of the running attempt."""
        context = self._contexts.get(job_id)
        return context.figures if context else None

    @property
    def trainings(self) -> list[RunningTraining] | None:
        """The attempts that run now; None before the jobs of an earlier daemon are taken up."""
        if not self._ready.is_set():
            return None
        return [context.training for context in self._contexts.values() if context.training is not None]

    @property
    def running_workers(self) -> int:
        return len(self._workers)

    async def wait_until_over(self, job_id: int) -> None:
        """Wait until the job needs no worker any more."""
        while (worker := self._workers.get(job_id)) is not None or job_id in self._being_replaced:
            await (asyncio.wait({worker}) if worker is not None else asyncio.sleep(0.01))

    # Workers

    def _start_worker(self, row: JobRow, context: JobContext | None = None) -> None:
        if self._stopping or row.id in self._workers:
            return
        self.services.cleaner.revived(row.id)
        context = self._contexts[row.id] = context or JobContext(self.services, row)
        self.services.job_ids[context.key] = row.id
        self._workers[row.id] = asyncio.create_task(self._run_worker(context), name=f"job {row.id}")

    async def _run_worker(self, context: JobContext) -> None:
        """Run a worker to its end; start another one if a second start has revived the job meanwhile."""
        job_id = context.row.id
        try:
            await JobWorker(context).run()
        finally:
            if self._workers.get(job_id) is asyncio.current_task():
                del self._workers[job_id], self._contexts[job_id]
                self.services.job_ids.pop(context.key, None)
        # A change made before the worker ended is in the store by now; a later one starts a worker itself.
        row = await self._load_patiently(job_id)
        if job_id in self._workers or job_id in self._being_replaced:
            return
        if row.state.is_over and row.lock_token == context.row.lock_token:
            self.on_over(context.key)
        else:
            self._start_worker(row)

    async def _load(self, job_id: int) -> JobRow:
        return await self.services.store.read(get_job, job_id)

    async def _load_patiently(self, job_id: int) -> JobRow:
        """Load the row, however long the store cannot be read: reservations depend on it."""
        while True:
            try:
                return await self._load(job_id)
            except StoreUnavailable as error:
                log.warning("job %d waits for the store: %s", job_id, str(error))
                await asyncio.sleep(self.services.timings.pause(1, self.services.random))

    async def _replace_worker(self, row: JobRow) -> None:
        """Cancel the worker, which may be waiting for long, and give its context to another one."""
        task, context = self._workers.pop(row.id, None), self._contexts.pop(row.id, None)
        self._being_replaced.add(row.id)
        try:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            if context is not None:
                context.row = row
                context.show_state()
            self._start_worker(row, context)
        finally:
            self._being_replaced.discard(row.id)

    def _gpu_lost(self, key: TaskKey, gpu: str, why: str) -> None:
        for context in self._contexts.values():
            if context.key == key:
                context.gpu_lost = f"GPU {gpu}: {why}"
                context.alert(AlertKind.GPU_LOST, f"it loses GPU {gpu}: {why}")
                context.woken.set()


# After a restart


async def adopt_open_jobs(services: JobServices) -> list[tuple[JobRow, JobContext]]:
    """Return every job that needs a worker, with its GPUs adopted; those that hold GPUs come first."""
    now = services.clock()

    def query(db: sqlite3.Connection) -> tuple[list[JobRow], dict[int, AttemptRow]]:
        rows = {row.id: row for row in store_jobs.open_jobs(db, now)}
        running = {attempt.job_id: attempt for attempt in attempts.open_attempts(db)}
        for job_id in running.keys() - rows.keys():  # over, but not cleaned up
            rows[job_id] = store_jobs.get_job(db, job_id)
        return list(rows.values()), running

    rows, running = await services.store.read(query)
    rows.sort(key=lambda row: (row.id not in running, row.id))
    services.inputs.release_all_but({row.id for row in rows})
    contexts = []
    for number, row in enumerate(rows, 1):
        if number % ADOPTED_AT_A_TIME == 0:
            await asyncio.sleep(0)
        context = JobContext(services, row)
        if (attempt := running.get(row.id)) is not None:
            context.adopt_gpus(attempt.gpus)
        contexts.append((row, context))
    if rows:
        log.info("taking up %d jobs, %d of them with a run", len(rows), len(running))
    return contexts


async def sweep_orphans_forever(services: JobServices) -> None:
    """Sweep again and again: a backend may carry out a request long after its caller has gone."""
    while True:
        await sweep_orphans(services)
        await asyncio.sleep(SWEEP_SECONDS)


async def sweep_orphans(services: JobServices) -> None:
    """Remove the runs of this data directory that a backend has and no job knows."""
    await asyncio.gather(*(_sweep(services, backend) for backend in services.all_backends))


async def _sweep(services: JobServices, backend: Backend) -> None:
    failures = 0
    while True:
        try:
            await _sweep_once(services, backend)
        except (BackendUnreachable, StoreUnavailable) as error:
            failures += 1
            log.warning("cannot look for orphaned runs: %s", str(error))
        else:
            return
        await asyncio.sleep(services.timings.pause(failures, services.random))


async def _sweep_once(services: JobServices, backend: Backend) -> None:
    runs = await backend.list_runs()
    # Read after the backend was asked: an attempt is in the store before the backend gets it.
    known = {attempt.key for attempt in await services.store.read(attempts.open_attempts)}
    for run in runs:
        tried = {trials.running_key for trials in services.trials.values()}
        if run.key not in known and run.key not in tried:
            await _remove_orphan(backend, run, services.timings)


async def _remove_orphan(backend: Backend, run: BackendRun, timings: JobTimings) -> None:
    if run.run_dir is not None:
        waited = 0.0
        while (await backend.poll(run.ref, run.run_dir)).phase in (RunPhase.RUNNING, RunPhase.QUEUED):
            if waited == 0.0:
                log.warning("ending the run %s: no job knows it", run.key)
                await backend.stop(run.ref, force=True)
            if waited > timings.grace_s:
                log.error("the run %s does not end", run.key)
                return
            waited += timings.poll_s
            await asyncio.sleep(timings.poll_s)
    await backend.remove(run.ref)
    log.info("removed what the backend had of %s", run.key)
