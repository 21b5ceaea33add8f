from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pytest

from core.tasks import TaskType
from core.wire import MinerSubmission
from miner.fleet.base import TaskKey
from miner.jobs.states import EndReason, JobState
from miner.store import database, jobs, work
from miner.store.books import Books
from miner.store.jobs import Start
from miner.store.work import JobRow, NoSuchJob, Stale
from tests.miner.jobs.house import books_in

T = TypeVar("T")
Do = Callable[[Callable[[sqlite3.Connection], T]], T]


def start(task_id: str = "t1", repo: str | None = "r1", hours: float = 2.0) -> Start:
    return Start(task_id, TaskType.DPO, "a/b", hours, repo, time.time(), b'{"raw": 1}')


@pytest.fixture
async def books(tmp_path: Path) -> AsyncIterator[Books]:
    made = books_in(tmp_path)
    made.writer.start(asyncio.get_running_loop())
    yield made
    await made.writer.close()


@pytest.fixture
async def job(books: Books) -> JobRow:
    started = await books.record_start("v1", start(), now=time.time())
    return read(books, lambda db: work.job(db, started.job_id))


def read(books: Books, query: Callable[[sqlite3.Connection], T]) -> T:
    with closing(database.connect_for_reading(books.path)) as connection:
        return query(connection)


async def write(books: Books, piece: Callable[[sqlite3.Connection], T]) -> T:
    return await books.writer.submit(piece)


def attempt(db: sqlite3.Connection, job: JobRow, number: int = 1, **more: Any) -> JobRow:
    values: dict[str, Any] = {
        "engine": "process",
        "key": f"k{number}",
        "folder": "/f",
        "gpus": ("0", "1"),
        "end_by": 9.0,
    }
    return work.begin_attempt(db, job.id, job.lock_token, 5.0, number=number, **{**values, **more})


async def test_a_worker_with_an_old_token_writes_nothing(books: Books, job: JobRow) -> None:
    moved = await write(books, lambda db: work.move(db, job.id, job.lock_token, JobState.PREPARING, 1.0))
    assert moved.lock_token > job.lock_token
    for piece in (
        lambda db: work.move(db, job.id, job.lock_token, JobState.FAILED, 2.0),
        lambda db: work.begin_step(db, job.id, job.lock_token, "fetch", None, 2.0),
        lambda db: attempt(db, job),
    ):
        with pytest.raises(Stale):
            await write(books, piece)
    assert read(books, lambda db: work.job(db, job.id)) == moved
    assert read(books, lambda db: work.attempts(db, job.id)) == []


async def test_a_second_start_makes_every_worker_look_again(books: Books, job: JobRow) -> None:
    await books.record_start("v1", start(repo="r2"), now=time.time())
    with pytest.raises(Stale):
        await write(books, lambda db: work.move(db, job.id, job.lock_token, JobState.PREPARING, 1.0))


async def test_an_attempt_and_its_jobs_state_are_one_fact(books: Books, job: JobRow) -> None:
    moved = await write(books, lambda db: attempt(db, job))
    assert moved.state is JobState.TRAINING
    (row,) = read(books, work.open_attempts)
    assert (row.key, row.gpus, row.end_by, row.ref) == ("k1", ("0", "1"), 9.0, None)
    await write(books, lambda db: work.set_ref(db, row.id, "container-1"))
    assert read(books, work.open_attempts)[0].ref == "container-1"


async def test_the_first_word_on_an_attempts_end_stands(books: Books, job: JobRow) -> None:
    await write(books, lambda db: attempt(db, job))
    (row,) = read(books, work.open_attempts)
    for reason in (EndReason.OOM, EndReason.CANCELLED):
        await write(books, lambda db, reason=reason: work.end_attempt(db, row.id, 6.0, reason, "why"))  # type: ignore[misc]
    (ended,) = read(books, lambda db: work.attempts(db, job.id))
    assert (ended.end_reason, ended.detail, ended.ended_at) == (EndReason.OOM, "why", 6.0)
    assert read(books, work.open_attempts) == []


async def test_a_model_that_is_refused_changes_its_attempts_end(books: Books, job: JobRow) -> None:
    await write(books, lambda db: attempt(db, job))
    (row,) = read(books, work.open_attempts)
    await write(books, lambda db: work.end_attempt(db, row.id, 6.0, EndReason.TRAINED, ""))
    await write(books, lambda db: work.refuse(db, job.id, 1, "NaN weights"))
    (ended,) = read(books, lambda db: work.attempts(db, job.id))
    assert (ended.end_reason, ended.detail) == (EndReason.BAD_SUBMISSION, "NaN weights")


async def test_a_step_that_was_cut_short_is_noted_as_interrupted(books: Books, job: JobRow) -> None:
    await write(books, lambda db: work.begin_step(db, job.id, job.lock_token, "fetch", None, 1.0))
    second = await write(books, lambda db: work.begin_step(db, job.id, job.lock_token, "fetch", None, 2.0))
    await write(books, lambda db: work.end_step(db, second, "ok", "", 3.0))
    found = read(books, lambda db: work.steps(db, job.id))
    assert [(one.outcome, one.ended_at) for one in found] == [("interrupted", 2.0), ("ok", 3.0)]


async def test_another_life_forgets_the_attempts_of_the_one_before(books: Books, job: JobRow) -> None:
    moved = await write(books, lambda db: attempt(db, job))
    failed = await write(
        books, lambda db: work.move(db, job.id, moved.lock_token, JobState.FAILED, 7.0, reason=EndReason.OOM)
    )
    assert failed.ended_at == 7.0
    await write(books, lambda db: jobs.revive(db, job.id, 8.0))
    alive = read(books, lambda db: work.job(db, job.id))
    assert (alive.state, alive.end_reason, alive.ended_at, alive.counted_from) == (
        JobState.QUEUED,
        None,
        None,
        1,
    )


async def test_a_job_past_its_deadline_is_done_where_something_is_published(
    books: Books, job: JobRow
) -> None:
    other = await books.record_start("v2", start("t2"), now=time.time())
    await books.record_submission(TaskKey("v1", "t1"), MinerSubmission(repo="me/r1"))
    late = await books.fail_late(time.time() + 10_000)
    assert {key.task_id for key in late} == {"t1", "t2"}
    done, failed = (read(books, lambda db, n=n: work.job(db, n)) for n in (job.id, other.job_id))  # type: ignore[misc]
    assert (done.state, done.end_reason) == (JobState.DONE, EndReason.PUBLISHED)
    assert (failed.state, failed.end_reason) == (JobState.FAILED, EndReason.DEADLINE)


async def test_jobs_that_need_a_worker_are_the_open_and_the_misnamed(books: Books, job: JobRow) -> None:
    now = time.time()
    done = await write(books, lambda db: work.move(db, job.id, job.lock_token, JobState.DONE, now))
    assert read(books, lambda db: work.open_jobs(db, now)) == []
    await books.record_submission(TaskKey("v1", "t1"), MinerSubmission(repo="me/r1"))
    assert read(books, lambda db: work.open_jobs(db, now)) == []
    await books.record_start("v1", start(repo="r2"), now=now)
    (misnamed,) = read(books, lambda db: work.open_jobs(db, now))
    assert misnamed.misnamed
    assert not done.misnamed
    assert read(books, lambda db: work.open_jobs(db, now + 10_000)) == [], "nobody asks after the deadline"


@pytest.mark.parametrize(
    ("word", "found"), [("1", 1), ("t1", 1), ("abc-1", 2), ("abc-1x", 3), ("abc-1x".upper(), None)]
)
async def test_jobs_are_found_by_number_task_or_its_beginning(
    books: Books, job: JobRow, word: str, found: int | None
) -> None:
    for task in ("abc-1", "abc-1xyz"):
        await books.record_start("v1", start(task), now=time.time())
    if found is None:
        with pytest.raises(NoSuchJob, match="no job 'ABC-1X'"):
            read(books, lambda db: work.find_job(db, word))
    else:
        assert read(books, lambda db: work.find_job(db, word)).id == found


@pytest.mark.parametrize("word", ["abc", "", "%", "99", "9" * 30])
async def test_what_names_no_job_or_several_is_told(books: Books, job: JobRow, word: str) -> None:
    for task in ("abc-1", "abc-2"):
        await books.record_start("v1", start(task), now=time.time())
    with pytest.raises(NoSuchJob, match="jobs list"):
        read(books, lambda db: work.find_job(db, word))


async def test_a_lesson_is_kept_until_the_next_one(books: Books) -> None:
    assert read(books, lambda db: work.lesson(db, "s")) is None
    for text in ("1", "2"):
        await write(books, lambda db, text=text: work.keep_lesson(db, "s", text, 1.0))  # type: ignore[misc]
    assert read(books, lambda db: work.lesson(db, "s")) == "2"
