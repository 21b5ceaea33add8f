"""What a job's worker writes to the store and reads from it, one method per fact.

All writes go through the daemon's one writer and are on disk when awaited. Those that take a `JobRow`
compare its lock token with the store and raise `Stale` when somebody else has changed the job since.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from core.domain.job_states import EndReason, JobState, StepFailed
from core.domain.keys import TaskKey
from core.domain.wire import MinerSubmission
from core.planning.calibration import LearnedBounds
from miner.store import attempts as store_attempts
from miner.store import jobs as store_jobs
from miner.store.attempts import AttemptRow
from miner.store.jobs import JobRow, RecordedStart, StartRequest
from miner.store.store import Store

T = TypeVar("T")


class JobRecords:
    def __init__(self, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self.clock = clock

    # Reading: off the event loop, from a connection of its own.

    async def load(self, job_id: int) -> JobRow:
        return await self._store.read(store_jobs.get_job, job_id)

    async def attempts(self, job_id: int) -> list[AttemptRow]:
        return await self._store.read(store_attempts.attempts_of, job_id)

    async def learned(self, shape: str) -> LearnedBounds | None:
        text = await self._store.read(store_attempts.get_lesson, shape)
        return LearnedBounds.model_validate_json(text) if text else None

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        return await self._store.read(query)

    def read_now(self, query: Callable[[sqlite3.Connection], T]) -> T:
        return self._store.read_now(query)

    # Writing

    async def record_start(self, validator: str, start: StartRequest) -> RecordedStart:
        return await self._store.write(store_jobs.record_start, validator, start, self.clock())

    async def move(
        self, row: JobRow, state: JobState, reason: EndReason | None = None, detail: str = ""
    ) -> JobRow:
        return await self._store.write(
            store_attempts.set_job_state,
            row.id,
            row.lock_token,
            state,
            self.clock(),
            reason=reason,
            detail=detail[:2000],
        )

    async def begin_attempt(
        self,
        row: JobRow,
        number: int,
        *,
        engine: str,
        key: str,
        folder: str,
        gpus: tuple[str, ...],
        end_by: float,
    ) -> JobRow:
        return await self._store.write(
            store_attempts.begin_attempt,
            row.id,
            row.lock_token,
            self.clock(),
            number=number,
            engine=engine,
            key=key,
            folder=folder,
            gpus=gpus,
            end_by=end_by,
        )

    async def set_ref(self, attempt: AttemptRow, ref: str) -> None:
        await self._store.write(store_attempts.set_engine_ref, attempt.id, ref)

    async def end_attempt(self, attempt: AttemptRow, reason: EndReason, detail: str) -> None:
        await self._store.write(store_attempts.end_attempt, attempt.id, self.clock(), reason, detail[:2000])

    async def record_refusal(self, row: JobRow, number: int, detail: str) -> None:
        """What the attempt left is no valid submission after all."""
        await self._store.write(store_attempts.mark_bad_submission, row.id, number, detail[:2000])

    async def record_submission(self, row: JobRow, made: MinerSubmission) -> JobRow:
        """A fact about the hub, so it is kept whoever has changed the job meanwhile."""
        key = TaskKey(row.validator, row.task_id)
        await self._store.write(store_jobs.record_submission, key, made, self.clock())
        return await self.load(row.id)

    async def revive(self, row: JobRow) -> JobRow:
        """Another try at a job that has ended."""
        return await self._store.write(store_attempts.retry_job, row.id, row.lock_token, self.clock())

    async def keep_lesson(self, shape: str, learned: LearnedBounds) -> None:
        text = learned.model_dump_json()
        await self._store.write(store_attempts.save_lesson, shape, text, self.clock())

    @asynccontextmanager
    async def step(self, row: JobRow, name: str, attempt: int | None = None) -> AsyncIterator[None]:
        """Written down before and after. A step that the daemon's own end cuts short has no after: the next
        life notes it as interrupted."""
        step_id = await self._store.write(
            store_attempts.begin_step, row.id, row.lock_token, name, attempt, self.clock()
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
                await self._store.write(
                    store_attempts.end_step, step_id, outcome, detail[:2000], self.clock()
                )
