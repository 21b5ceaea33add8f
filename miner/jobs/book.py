"""What a worker writes down and reads of its job, one method per fact.

All writes go through the daemon's one writer and are on disk when awaited. Those that take a `JobRow` hold
its token against the books and raise `Stale` when somebody else has changed the job since.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from core.planning.learned import Learned
from core.wire import MinerSubmission
from miner.fleet.base import TaskKey
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason, JobState
from miner.store import jobs as starts
from miner.store import work
from miner.store.books import Books
from miner.store.jobs import Start, Started
from miner.store.work import AttemptRow, JobRow

T = TypeVar("T")


class JobBook:
    def __init__(self, books: Books, *, clock: Callable[[], float] = time.time) -> None:
        self._books = books
        self.clock = clock

    # Reading: off the event loop, from a connection of its own.

    async def load(self, job_id: int) -> JobRow:
        return await self.read(lambda connection: work.job(connection, job_id))

    async def attempts(self, job_id: int) -> list[AttemptRow]:
        return await self.read(lambda connection: work.attempts(connection, job_id))

    async def learned(self, shape: str) -> Learned | None:
        text = await self.read(lambda connection: work.lesson(connection, shape))
        return Learned.model_validate_json(text) if text else None

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.to_thread(self.read_now, query)

    def read_now(self, query: Callable[[sqlite3.Connection], T]) -> T:
        with self._books.reading() as connection:
            return query(connection)

    # Writing

    async def record_start(self, validator: str, start: Start) -> Started:
        return await self._books.record_start(validator, start, now=self.clock())

    async def move(
        self, row: JobRow, state: JobState, reason: EndReason | None = None, detail: str = ""
    ) -> JobRow:
        now = self.clock()
        return await self._write(
            lambda db: work.move(db, row.id, row.lock_token, state, now, reason=reason, detail=detail[:2000])
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
        now = self.clock()
        return await self._write(
            lambda db: work.begin_attempt(
                db,
                row.id,
                row.lock_token,
                now,
                number=number,
                engine=engine,
                key=key,
                folder=folder,
                gpus=gpus,
                end_by=end_by,
            )
        )

    async def set_ref(self, attempt: AttemptRow, ref: str) -> None:
        await self._write(lambda db: work.set_ref(db, attempt.id, ref))

    async def end_attempt(self, attempt: AttemptRow, reason: EndReason, detail: str) -> None:
        now = self.clock()
        await self._write(lambda db: work.end_attempt(db, attempt.id, now, reason, detail[:2000]))

    async def refuse(self, row: JobRow, number: int, detail: str) -> None:
        """What the attempt left is no valid submission after all."""
        await self._write(lambda db: work.refuse(db, row.id, number, detail[:2000]))

    async def submitted(self, row: JobRow, made: MinerSubmission) -> JobRow:
        """A fact about the hub, so it is kept whoever has changed the job meanwhile."""
        await self._books.record_submission(TaskKey(row.validator, row.task_id), made)
        return await self.load(row.id)

    async def revive(self, row: JobRow) -> JobRow:
        """Another try at a job that has ended."""
        now = self.clock()

        def piece(db: sqlite3.Connection) -> JobRow:
            work.guard(db, row.id, row.lock_token)
            starts.revive(db, row.id, now)
            return work.job(db, row.id)

        return await self._write(piece)

    async def keep_lesson(self, shape: str, learned: Learned) -> None:
        now, text = self.clock(), learned.model_dump_json()
        await self._write(lambda db: work.keep_lesson(db, shape, text, now))

    @asynccontextmanager
    async def step(self, row: JobRow, name: str, attempt: int | None = None) -> AsyncIterator[None]:
        """Written down before and after. A step that the daemon's own end cuts short has no after: the next
        life notes it as interrupted."""
        now = self.clock()
        step_id = await self._write(
            lambda db: work.begin_step(db, row.id, row.lock_token, name, attempt, now)
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
                ended = self.clock()
                await self._write(lambda db: work.end_step(db, step_id, outcome, detail[:2000], ended))

    async def _write(self, piece: Callable[[sqlite3.Connection], T]) -> T:
        return await self._books.writer.submit(piece)
