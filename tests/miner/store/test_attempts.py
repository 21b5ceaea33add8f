from __future__ import annotations

import sqlite3
import time

import pytest

from core.domain.job_states import EndReason, JobState
from miner.store import attempts
from miner.store.attempts import (
    NO_CURVES,
    AttemptRow,
    StaleJob,
    StoredFigures,
    attempts_of,
    figures_of,
    open_attempts,
    save_figures,
    set_job_state,
    steps_of,
)
from miner.store.events import prune_history
from miner.store.jobs import JobRow, get_job, record_start
from miner.store.store import Store
from tests.miner.store.rows import start_request


@pytest.fixture
async def job(store: Store) -> JobRow:
    started = await store.write(record_start, "v1", start_request(), time.time())
    return store.read_now(get_job, started.job_id)


def begin_attempt(connection: sqlite3.Connection, job: JobRow) -> JobRow:
    attempt = attempts.NewAttempt(1, "process", "k1", "/f", ("0", "1"), 9.0)
    return attempts.begin_attempt(connection, job.id, job.lock_token, 5.0, attempt)


@pytest.fixture
async def attempt(store: Store, job: JobRow) -> AttemptRow:
    assert (await store.write(begin_attempt, job)).state is JobState.TRAINING
    (row,) = store.read_now(open_attempts)
    return row


async def test_a_worker_with_an_old_token_writes_nothing(store: Store, job: JobRow) -> None:
    changed = await store.write(set_job_state, job.id, job.lock_token, JobState.PREPARING, 1.0)
    assert changed.lock_token > job.lock_token
    for write in (
        store.write(set_job_state, job.id, job.lock_token, JobState.FAILED, 2.0),
        store.write(attempts.begin_step, job.id, job.lock_token, "fetch", None, 2.0),
        store.write(attempts.retry_job, job.id, job.lock_token, 2.0),
        store.write(begin_attempt, job),
    ):
        with pytest.raises(StaleJob):
            await write
    assert store.read_now(get_job, job.id) == changed
    assert store.read_now(attempts_of, job.id) == []


async def test_an_attempt_is_stored_with_its_gpus_and_then_its_backends_name(
    store: Store, attempt: AttemptRow
) -> None:
    assert (attempt.key, attempt.gpus, attempt.end_by, attempt.ref) == ("k1", ("0", "1"), 9.0, None)
    await store.write(attempts.set_backend_ref, attempt.id, "container-1")
    assert store.read_now(open_attempts)[0].ref == "container-1"


async def test_the_first_reason_of_an_attempts_end_stands(store: Store, attempt: AttemptRow) -> None:
    for reason in (EndReason.OOM, EndReason.CANCELLED):
        await store.write(attempts.end_attempt, attempt.id, 6.0, reason, "why")
    (ended,) = store.read_now(attempts_of, attempt.job_id)
    assert (ended.end_reason, ended.detail, ended.ended_at) == (EndReason.OOM, "why", 6.0)
    assert store.read_now(open_attempts) == []


async def test_a_model_that_is_refused_changes_its_attempts_end(store: Store, attempt: AttemptRow) -> None:
    await store.write(attempts.end_attempt, attempt.id, 6.0, EndReason.TRAINED, "")
    await store.write(attempts.mark_bad_submission, attempt.job_id, 1, "NaN weights")
    (ended,) = store.read_now(attempts_of, attempt.job_id)
    assert (ended.end_reason, ended.detail) == (EndReason.BAD_SUBMISSION, "NaN weights")


async def test_of_a_long_detail_only_the_beginning_is_stored(store: Store, attempt: AttemptRow) -> None:
    long, short = "x" * 100_000, "x" * 2000
    await store.write(attempts.end_attempt, attempt.id, 6.0, EndReason.CRASHED, long)
    assert store.read_now(attempts_of, attempt.job_id)[0].detail == short
    await store.write(attempts.mark_bad_submission, attempt.job_id, 1, long)
    assert store.read_now(attempts_of, attempt.job_id)[0].detail == short
    token = store.read_now(get_job, attempt.job_id).lock_token
    step = await store.write(attempts.begin_step, attempt.job_id, token, "fetch", None, 1.0)
    await store.write(attempts.end_step, step, "bug", long, 2.0)
    assert store.read_now(steps_of, attempt.job_id)[-1].detail == short
    ended = await store.write(
        attempts.set_job_state, attempt.job_id, token, JobState.FAILED, 3.0, reason=EndReason.BUG, detail=long
    )
    assert ended.detail == short


async def test_a_step_that_was_cut_short_is_marked_as_interrupted(store: Store, job: JobRow) -> None:
    await store.write(attempts.begin_step, job.id, job.lock_token, "fetch", None, 1.0)
    second = await store.write(attempts.begin_step, job.id, job.lock_token, "fetch", None, 2.0)
    await store.write(attempts.end_step, second, "ok", "", 3.0)
    steps = store.read_now(steps_of, job.id)
    assert [(step.outcome, step.ended_at) for step in steps] == [("interrupted", 2.0), ("ok", 3.0)]


async def test_a_reopened_job_does_not_count_its_earlier_attempts(store: Store, attempt: AttemptRow) -> None:
    token = store.read_now(get_job, attempt.job_id).lock_token
    failed = await store.write(
        set_job_state, attempt.job_id, token, JobState.FAILED, 7.0, reason=EndReason.OOM
    )
    assert failed.ended_at == 7.0
    job = await store.write(attempts.retry_job, failed.id, failed.lock_token, 8.0)
    assert (job.state, job.end_reason, job.ended_at, job.counted_from) == (JobState.QUEUED, None, None, 1)


async def test_a_lesson_is_kept_until_the_next_one(store: Store) -> None:
    assert store.read_now(attempts.get_lesson, "s") is None
    for text in ("1", "2"):
        await store.write(attempts.save_lesson, "s", text, 1.0)
    assert store.read_now(attempts.get_lesson, "s") == "2"


async def test_of_attempts_beyond_the_newest_only_what_they_came_to_is_kept(
    store: Store, attempt: AttemptRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = StoredFigures(
        '{"steps":7,"seconds":6200.12345678}',
        '{"steps": {"step": [1], "t": [2.0], "loss": [3.0]}, "evals": []}',
    )
    await store.write(save_figures, attempt.id, stored)
    job = store.read_now(get_job, attempt.job_id)
    await store.write(attempts.begin_step, job.id, job.lock_token, "fetch", None, 2.0)
    monkeypatch.setattr("miner.store.events.MAX_DETAILED_ATTEMPTS", 0)
    assert await store.write(prune_history, 0.0) == 0  # the job goes on
    await store.write(set_job_state, job.id, job.lock_token, JobState.DONE, 9.0)
    assert await store.write(prune_history, 0.0) == 1
    assert await store.write(prune_history, 0.0) == 0
    assert store.read_now(figures_of, job.id) == {
        attempt.id: StoredFigures('{"steps":7,"seconds":6200.12}', NO_CURVES)
    }
    assert store.read_now(steps_of, job.id) == []
    assert store.read_now(get_job, job.id).state is JobState.DONE
