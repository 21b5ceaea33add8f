"""All jobs of this daemon: a worker for each that needs one, and doors for whoever wants something of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from core.errors import GodMinerError
from miner.fleet.base import TaskKey
from miner.jobs import recovery
from miner.jobs.desk import Desk, Parts
from miner.jobs.live import Live
from miner.jobs.pulse import pulse
from miner.jobs.room import Room
from miner.jobs.states import EndReason, JobState
from miner.jobs.worker import Worker
from miner.store.jobs import Start, Started
from miner.store.work import JobRow, Stale
from miner.store.writer import StoreUnavailable

log = logging.getLogger(__name__)

#: A row that changes faster than this many looks is being fought over.
_LOOKS = 20


class NotNow(GodMinerError):
    """The job is in no state for what was asked."""

    code = "job_state"


class NoJobsYet(GodMinerError):
    """Nothing can be done for jobs before there is an engine."""

    code = "no_jobs_yet"


class Jobs:
    def __init__(
        self,
        parts: Parts,
        *,
        room: Room | None = None,
        on_taken: Callable[[TaskKey], None] = lambda _key: None,
        on_over: Callable[[TaskKey], None] = lambda _key: None,
    ) -> None:
        self.parts = parts
        self.room = room
        self._on_taken = on_taken
        self._on_over = on_over
        self._desks: dict[int, Desk] = {}
        self._workers: dict[int, asyncio.Task[None]] = {}
        #: What goes on beside the jobs.
        self._beside: list[asyncio.Task[None]] = []
        #: Jobs whose worker is being replaced.
        self._between: set[int] = set()
        self._stopping = False
        self._up = asyncio.Event()

    # Starting and stopping with the daemon

    async def start(self) -> None:
        """Take up what earlier lives of this daemon have left. What runs goes on meanwhile."""
        self.parts.fleet.on_lost(self._gpu_lost)
        for row, held in await recovery.take_up(self.parts):
            self._begin(row, held)
        self._up.set()
        self._beside = [
            asyncio.create_task(recovery.sweep_for_good(self.parts), name="orphans"),
            asyncio.create_task(pulse(self.parts), name="pulse"),
        ]

    async def stop(self) -> None:
        """Let go of everything. Trainings go on without us; uploads go on with the next life."""
        self._stopping = True
        self.parts.bus.close()
        self._up.set()
        tasks = [*self._workers.values(), *self._beside]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Stop, and let go of the engines as well."""
        await self.stop()
        for engine in (self.parts.engine, *self.parts.others.values()):
            await engine.close()

    # What happens to jobs

    async def take(self, start: Start, validator: str) -> Started:
        """A start that came in by another door than the validators'."""
        self._on_taken(TaskKey(validator, start.task_id))
        started = await self.parts.book.record_start(validator, start)
        await self.started(started.job_id)
        return started

    async def started(self, job_id: int) -> None:
        """A start came in: a new job, or a known one with another name or deadline."""
        await self._up.wait()  # no new job may take the GPUs of one that is not adopted yet
        row = await self._settled(job_id)
        desk = self._desks.get(job_id)
        if desk is None:
            self._begin(row)
            return
        await desk.reload()
        desk.poke()

    async def _settled(self, job_id: int) -> JobRow:
        """The job's row, at an instant at which it is certain whether it has a worker: two would launch it
        twice."""
        while True:
            row = await self.parts.book.load(job_id)
            if job_id not in self._between:
                return row
            await asyncio.sleep(0.01)

    async def cancel(self, job_id: int) -> JobRow:
        """End it. What is published stays."""
        for _ in range(_LOOKS):
            row = await self.parts.book.load(job_id)
            if row.state.is_over:
                raise NotNow(f"job {job_id} is over already ({row.state}); there is nothing to cancel")
            try:
                row = await self.parts.book.move(row, JobState.CANCELLED, EndReason.CANCELLED)
            except Stale:
                continue
            log.info("job %d is cancelled", job_id, extra={"task_id": row.task_id, "job_id": job_id})
            await self._restart(row)
            return row
        raise NotNow(f"job {job_id} changes all the time; try again")

    async def retry(self, job_id: int) -> JobRow:
        """Another life for a job that has failed or was cancelled, while there is time."""
        row = await self.parts.book.load(job_id)
        if row.state not in (JobState.FAILED, JobState.CANCELLED):
            raise NotNow(f"job {job_id} is {row.state}; only a failed or cancelled one can be tried again")
        if row.deadline_at <= self.parts.clock():
            raise NotNow(f"the deadline of job {job_id} has passed; no try could come to anything")
        row = await self.parts.book.revive(row)
        await self.started(job_id)
        return row

    def live(self, job_id: int) -> Live | None:
        desk = self._desks.get(job_id)
        return desk.live if desk else None

    @property
    def working(self) -> int:
        return len(self._workers)

    async def over(self, job_id: int) -> None:
        """Until the job needs no worker any more."""
        while (worker := self._workers.get(job_id)) is not None or job_id in self._between:
            await (asyncio.wait({worker}) if worker is not None else asyncio.sleep(0.01))

    # Workers

    def _begin(self, row: JobRow, desk: Desk | None = None) -> None:
        if self._stopping or row.id in self._workers:
            return
        if self.room is not None:
            self.room.used_again(row.id)
        desk = self._desks[row.id] = desk or Desk(self.parts, row)
        self.parts.numbers[desk.key] = row.id
        self._workers[row.id] = asyncio.create_task(self._work(desk), name=f"job {row.id}")

    async def _work(self, desk: Desk) -> None:
        """One life of the job; another one when a second start has revived it meanwhile."""
        job_id = desk.row.id
        try:
            await Worker(desk).run()
        finally:
            if self._workers.get(job_id) is asyncio.current_task():
                del self._workers[job_id], self._desks[job_id]
                self.parts.numbers.pop(desk.key, None)
        # Whoever changed the job before we left is in the books by now; who does it later finds nobody.
        row = await self._row(job_id)
        if job_id in self._workers or job_id in self._between:
            return
        if row.state.is_over and row.lock_token == desk.row.lock_token:
            self._on_over(desk.key)
        else:
            self._begin(row)

    async def _row(self, job_id: int) -> JobRow:
        """However long the store can't be read: who was promised what hangs on it."""
        while True:
            try:
                return await self.parts.book.load(job_id)
            except StoreUnavailable as error:
                log.warning("job %d waits for the store: %s", job_id, str(error))
                await asyncio.sleep(self.parts.pace.pause(1, self.parts.random))

    async def _restart(self, row: JobRow) -> None:
        """A worker that waits for something long is not asked to look up: another one takes over its desk."""
        task, desk = self._workers.pop(row.id, None), self._desks.pop(row.id, None)
        self._between.add(row.id)
        try:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            if desk is not None:
                desk.row = row
                desk.show()
            self._begin(row, desk)
        finally:
            self._between.discard(row.id)

    def _gpu_lost(self, key: TaskKey, gpu: str, why: str) -> None:
        for desk in self._desks.values():
            if desk.key == key:
                desk.gpu_lost = f"GPU {gpu}: {why}"
                self.parts.alert("gpu_lost", f"job {desk.row.id} loses GPU {gpu}: {why}")
                desk.poke()
