"""What an operator and a validator may want of a job while it is worked on."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import pytest

from core.domain.job_states import EndReason, JobState
from core.domain.keys import ReservationKind
from core.domain.tasks import TaskType
from core.runs.run_files import RunEnd
from miner.jobs import manager
from miner.jobs.manager import JobStateConflict
from miner.store import database
from miner.store import jobs as store_jobs
from miner.store.jobs import NoSuchJob, StartRequest
from tests.miner.jobs.harness import Gate, JobsHarness, Trainer, deaf, ending, obeys, request

OTHER_VALIDATOR = "5CiPPseXPECbkjWCa6MnjNokrgYjMqmKndv2rSnekmSK2DjL"


async def published_as(harness: JobsHarness, job: int, repo: str) -> None:
    row = await harness.done(job)
    assert row.submission.repo == repo
    assert repo in harness.hub.repos


async def test_a_cancelled_training_is_ended_and_gives_its_gpus_back(harness: JobsHarness) -> None:
    harness.backend.default = obeys
    job = await harness.start()
    await harness.until(lambda: bool(harness.hub.commits))
    assert (await harness.jobs.cancel(job)).state is JobState.CANCELLED
    row = await harness.over_within(job)
    assert (row.state, row.end_reason) == (JobState.CANCELLED, EndReason.CANCELLED)
    assert row.submission is not None, "what is published stays"
    assert await harness.ends(job) == [EndReason.CANCELLED]
    assert not harness.backend.runs
    assert not harness.fleet.ledger.reservations


async def test_what_is_over_cannot_be_cancelled(harness: JobsHarness) -> None:
    job = await harness.start()
    await harness.done(job)
    with pytest.raises(JobStateConflict, match="over already"):
        await harness.jobs.cancel(job)
    with pytest.raises(JobStateConflict, match="only a failed or cancelled one"):
        await harness.jobs.retry(job)
    with pytest.raises(NoSuchJob, match="no job 99"):
        await harness.jobs.cancel(99)


@pytest.mark.parametrize("who", ["operator", "validator"])
async def test_a_failed_job_gets_another_try(harness: JobsHarness, who: str) -> None:
    harness.backend.scripts = [ending(RunEnd.BAD_DATA)]
    job = await harness.start()
    await harness.failed(job, EndReason.BAD_DATA)
    if who == "operator":
        assert (await harness.jobs.retry(job)).state is JobState.QUEUED
        await published_as(harness, job, "me/repo-1")
    else:
        assert await harness.start(name="repo-2") == job
        await published_as(harness, job, "me/repo-2")
    assert await harness.ends(job) == [EndReason.BAD_DATA, EndReason.TRAINED]


async def test_a_second_start_changes_the_name_of_what_is_being_trained(harness: JobsHarness) -> None:
    harness.backend.default = obeys
    job = await harness.start()
    await harness.until(lambda: bool(harness.hub.commits))
    assert await harness.start(name="repo-2", seconds=12.0) == job
    await published_as(harness, job, "me/repo-2")
    assert harness.hub.moves == [("me/repo-1", "me/repo-2")]
    assert len(harness.backend.submitted) == 1


@pytest.mark.parametrize("found", [True, False], ids=["as stored", "not where the store has it"])
async def test_a_second_start_moves_what_is_published_already(harness: JobsHarness, found: bool) -> None:
    job = await harness.start()
    await harness.done(job)
    if not found:
        harness.hub.repos["me/elsewhere"] = harness.hub.repos.pop("me/repo-1")
    await harness.start(name="repo-2")
    await published_as(harness, job, "me/repo-2")
    assert set(harness.hub.repos) == ({"me/repo-2"} if found else {"me/repo-2", "me/elsewhere"})
    assert len(harness.backend.submitted) == 1


async def test_changes_are_reported_to_whoever_listens(harness: JobsHarness) -> None:
    seen: list[str] = []

    async def listen() -> None:
        async for change in harness.services.events.listen():
            if change.kind == "job":
                seen.append(change.data["state"])

    listener = asyncio.create_task(listen())
    await asyncio.sleep(0)
    await harness.done(await harness.start())
    assert list(dict.fromkeys(seen)) == ["queued", "preparing", "training", "publishing", "done"]
    harness.services.events.close()
    await listener


async def test_starts_that_come_at_the_same_instant_have_one_worker(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    class Counted(manager.JobWorker):
        async def run(self) -> None:
            begun.append(self.job.row.id)
            await super().run()

    monkeypatch.setattr(manager, "JobWorker", Counted)
    gate = harness.backend.default = Gate()
    jobs = await asyncio.gather(*(harness.start() for _ in range(8)))
    gate.opened.set()
    row = await harness.done(jobs[0])
    assert row.starts == 8
    assert begun == [row.id]
    assert len(harness.backend.submitted) == 1


async def test_a_start_while_the_worker_is_being_replaced_makes_no_second_one(harness: JobsHarness) -> None:
    harness.backend.default = deaf
    job = await harness.launched()
    await asyncio.gather(harness.jobs.cancel(job), *(harness.jobs.started(job) for _ in range(5)))
    assert harness.jobs.running_workers == 1
    assert (await harness.over_within(job)).state is JobState.CANCELLED
    # One that was left behind would wait for its training for a minute.
    await harness.until(lambda: f"job {job}" not in [task.get_name() for task in asyncio.all_tasks()])


@pytest.mark.parametrize("names", [["repo-2"], ["repo-2", "repo-3"]])
async def test_a_name_that_changes_while_the_model_is_moved_is_the_one_in_the_end(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    job = await harness.start()
    await harness.done(job)
    move, going = harness.hub.move, asyncio.Event()

    async def slow(*arguments: Any, **more: Any) -> Any:
        going.set()
        await asyncio.sleep(0.05)
        return await move(*arguments, **more)

    monkeypatch.setattr(harness.hub, "move", slow)
    for name in names:
        going.clear()
        await harness.start(name=name)
        await going.wait()
    await harness.start(name="repo-9")
    await published_as(harness, job, "me/repo-9")
    assert set(harness.hub.repos) == {"me/repo-9"}


async def test_a_start_that_is_noted_as_the_worker_leaves_is_not_lost(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon hears of a start a moment after it is in the store."""
    forget = harness.hub.forget

    def at_the_last_moment(job_id: int) -> None:
        forget(job_id)
        if len(harness.hub.forgotten) == 1:
            assert [job.state for job in harness.store.read_now(store_jobs.newest_jobs, 9)] == ["done"]
            db = database.connect(harness.store.path)
            db.execute("UPDATE jobs SET expected_repo_name = 'repo-7', lock_token = lock_token + 1")
            db.close()

    monkeypatch.setattr(harness.hub, "forget", at_the_last_moment)
    job = await harness.start()
    await harness.until(lambda: "me/repo-7" in harness.hub.repos)
    await published_as(harness, job, "me/repo-7")


async def test_a_run_that_could_not_be_ended_in_time_keeps_its_gpus_while_its_model_is_published(
    harness: JobsHarness,
) -> None:
    async def saves_and_is_deaf(trainer: Trainer) -> None:
        trainer.save(0.5)
        await asyncio.sleep(60)

    harness.backend.default = saves_and_is_deaf
    job = await harness.start()
    await harness.until(lambda: bool(harness.hub.commits))
    harness.backend.gone = True
    await harness.start(seconds=3)
    await harness.in_state(job, JobState.DONE)
    assert [hold.kind for hold in harness.fleet.ledger.reservations] == [ReservationKind.JOB]
    harness.backend.gone = False
    await harness.over_within(job)
    assert not harness.backend.runs
    await harness.until(lambda: not harness.fleet.ledger.reservations)


async def test_no_validator_gets_another_ones_repository(harness: JobsHarness) -> None:
    await harness.done(await harness.start(name="repo-1"))
    before = dict(harness.hub.repos)
    raw = json.dumps(request("theirs")).encode()
    theirs = StartRequest("theirs", TaskType.INSTRUCT, "tiny/llama", 1.0, "repo-1", time.time(), raw)
    started = await harness.jobs.start_own(theirs, OTHER_VALIDATOR)
    live = harness.jobs.live(started.job_id)
    assert live is not None
    await harness.until(lambda: "another validator" in live.trouble)
    soon = replace(theirs, started_at=time.time(), hours=2 / 3600)
    row = await harness.over_within((await harness.jobs.start_own(soon, OTHER_VALIDATOR)).job_id)
    assert (row.state, row.submission) == (JobState.FAILED, None)
    assert "another validator" in row.detail
    assert harness.hub.repos == before


async def test_a_deadline_that_is_put_off_while_something_is_waited_for_counts(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, begun, come = harness.inputs.fetch, asyncio.Event(), asyncio.Event()

    async def late(*arguments: Any) -> Any:
        begun.set()
        await come.wait()
        return await fetch(*arguments)

    monkeypatch.setattr(harness.inputs, "fetch", late)
    job = await harness.start(seconds=12)
    await begun.wait()
    first = harness.jobs._contexts[job].timeline().end_by
    await harness.start(seconds=600)
    await asyncio.sleep(max(first - time.time(), 0.0) + 0.3)
    come.set()
    await harness.done(job)
