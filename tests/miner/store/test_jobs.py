from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from core.domain.job_states import EndReason, JobState
from core.domain.keys import TaskKey
from core.domain.tasks import TaskType
from core.domain.wire import MinerSubmission
from miner.offers.history import read_outcomes
from miner.store.attempts import set_job_state
from miner.store.jobs import (
    NoSuchJob,
    RecordedStart,
    StartRequest,
    fail_late_jobs,
    find_job,
    get_job,
    get_submission,
    open_jobs,
    record_start,
    record_submission,
)
from miner.store.store import Store
from tests.miner.store.rows import KEY, column, rows, start_request

TOO_LATE = 7300.0


async def start(store: Store, request: StartRequest | None = None, validator: str = "v1") -> RecordedStart:
    return await store.write(record_start, validator, request or start_request(), time.time())


async def fail_late(store: Store) -> list[TaskKey]:
    return await store.write(fail_late_jobs, time.time())


async def submit(store: Store, repo: str = "me/r1", key: TaskKey = KEY) -> bool:
    return await store.write(record_submission, key, MinerSubmission(repo=repo), time.time())


# Starts


async def test_a_repeated_start_replaces_name_and_deadline_and_creates_no_second_job(store: Store) -> None:
    first = await start(store, start_request(repo="r1", at=1000.0))
    again = await start(store, start_request(repo="r2", at=2000.0))
    assert (again.repeated, again.job_id) == (True, first.job_id)
    (job,) = rows(store, "SELECT * FROM jobs")
    assert (job["expected_repo_name"], job["deadline_at"], job["starts"]) == ("r2", 2000.0 + 7200, 2)
    assert job["lock_token"] == 2


async def test_a_repeated_start_turns_no_job_into_another(store: Store) -> None:
    def request(kind: TaskType = TaskType.DPO, model: str = "a/b", **data: object) -> StartRequest:
        text = {"dataset": "https://h/rows.json?sig=1", "dataset_type": {"field_chosen": "c"}, **data}
        return replace(start_request(), task_type=kind, model=model, request=json.dumps(text).encode())

    first = request()
    await start(store, first)
    others = (
        request(TaskType.INSTRUCT),
        request(model="a/c"),
        request(dataset="https://h/other.json?sig=1"),
        request(dataset_type={"field_chosen": "d"}),
    )
    for number, other in enumerate(others):
        assert (await start(store, replace(other, expected_repo_name=f"n{number}", hours=5.0))).differs
        (job,) = rows(store, "SELECT * FROM jobs")
        assert (job["task_type"], job["model"], job["request"]) == (TaskType.DPO, "a/b", first.request)
        assert (job["expected_repo_name"], job["hours"]) == (f"n{number}", 5.0)
    signed_again = request(dataset="https://h/rows.json?sig=2")
    assert not (await start(store, signed_again)).differs
    assert column(store, "SELECT request FROM jobs") == [signed_again.request]
    await start(store, replace(first, started_at=time.time() - TOO_LATE))
    await fail_late(store)
    after_failure = await start(store, request(TaskType.INSTRUCT))
    assert (after_failure.differs, after_failure.state) == (False, JobState.QUEUED)
    assert column(store, "SELECT task_type FROM jobs") == [TaskType.INSTRUCT]


async def test_an_infeasible_start_is_recorded_as_failed_and_may_be_tried_again(store: Store) -> None:
    for repeated in (False, True):
        failed = await store.write(record_start, "v1", start_request(), 1.0, infeasible=EndReason.INFEASIBLE)
        assert (failed.state, failed.end_reason) == (JobState.FAILED, EndReason.INFEASIBLE)
        assert failed.repeated == repeated
    queued = await start(store)
    assert (queued.state, queued.end_reason) == (JobState.QUEUED, None)
    kinds = ["start", "job_failed", "start_repeated", "job_failed", "start_repeated"]
    assert column(store, "SELECT kind FROM events ORDER BY id") == kinds


async def test_two_validators_may_use_one_task_id(store: Store) -> None:
    first = await start(store, start_request(repo="r1"))
    second = await start(store, start_request(repo="r2"), "v2")
    assert first.job_id != second.job_id
    assert await submit(store, "me/r2", TaskKey("v2", "t1"))
    assert await store.write(get_submission, KEY) is None


async def test_a_job_past_its_deadline_fails_or_is_done_if_something_is_published(store: Store) -> None:
    failed = await start(store, start_request("t2"), "v2")
    published = await start(store)
    await submit(store)
    late = await store.write(fail_late_jobs, time.time() + 10_000)
    assert set(late) == {KEY, TaskKey("v2", "t2")}
    ends = [
        (job.state, job.end_reason)
        for job in (store.read_now(get_job, failed.job_id), store.read_now(get_job, published.job_id))
    ]
    assert ends == [(JobState.FAILED, EndReason.DEADLINE), (JobState.DONE, EndReason.PUBLISHED)]
    assert column(store, "SELECT kind FROM events ORDER BY id")[-2:] == ["job_failed", "job_failed"]


async def test_a_failed_job_is_queued_again_if_it_is_started_again_in_time(store: Store) -> None:
    await start(store, start_request(at=time.time() - TOO_LATE))
    await fail_late(store)
    too_late = await start(store, start_request(at=time.time() - TOO_LATE + 50))
    assert too_late.state is JobState.FAILED
    in_time = await start(store)
    assert in_time.state is JobState.QUEUED
    assert column(store, "SELECT end_reason FROM jobs") == [None]


async def test_a_submission_is_answered_once_there_is_one(store: Store) -> None:
    await start(store)
    assert await store.write(get_submission, KEY) is None
    submission = MinerSubmission(repo="me/r1", model_hash="ab")
    assert await store.write(record_submission, KEY, submission, 1.0)
    assert await store.write(get_submission, KEY) == submission
    assert not await submit(store, key=TaskKey("v1", "t9"))


async def test_jobs_that_have_ended_are_there_to_be_learned_from(store: Store) -> None:
    await start(store, start_request("t1", at=time.time() - TOO_LATE))
    await store.write(record_start, "v1", start_request("t2"), 1.0, infeasible=EndReason.INFEASIBLE)
    await fail_late(store)
    outcomes = read_outcomes(store, time.time())
    assert [(outcome.task_type, outcome.published) for outcome in outcomes] == [(TaskType.DPO, False)]
    assert read_outcomes(store, time.time(), since=time.time() + 60) == []


# Reading


async def test_jobs_that_need_a_worker_are_the_open_and_the_misnamed(store: Store) -> None:
    now = time.time()
    job = store.read_now(get_job, (await start(store)).job_id)
    assert store.read_now(open_jobs, now) == [job]
    done = await store.write(set_job_state, job.id, job.lock_token, JobState.DONE, now)
    assert store.read_now(open_jobs, now) == []
    await submit(store)
    assert store.read_now(open_jobs, now) == []
    await start(store, start_request(repo="r2"))
    (misnamed,) = store.read_now(open_jobs, now)
    assert (misnamed.misnamed, done.misnamed) == (True, False)
    assert store.read_now(open_jobs, now + 10_000) == [], "nobody asks after the deadline"


async def test_jobs_are_found_by_number_task_or_its_beginning(store: Store) -> None:
    for task in ("t1", "abc-1", "abc-1xyz"):
        await start(store, start_request(task))
    for name, number in (("1", 1), ("t1", 1), ("abc-1", 2), ("abc-1x", 3)):
        assert store.read_now(find_job, name).id == number
    for name in ("ABC-1X", "abc", "", "%", "99", "9" * 30):
        with pytest.raises(NoSuchJob, match=f"{name!r}.*jobs list"):
            store.read_now(find_job, name)
    await start(store, start_request("t1"), "v2")
    with pytest.raises(NoSuchJob, match="which of the jobs 4, 1"):
        store.read_now(find_job, "t1")
