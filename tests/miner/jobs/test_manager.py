"""What an operator and a validator may want of a job while it is worked on."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from core.run_files import RunEnd
from core.tasks import TaskType
from miner.fleet.base import HoldKind
from miner.jobs import manager
from miner.jobs.manager import NotNow
from miner.jobs.states import EndReason, JobState
from miner.store import database, work
from miner.store.jobs import Start
from miner.store.work import NoSuchJob
from tests.miner.jobs.house import CAP_S, House, Trainer, request


async def obeys(trainer: Trainer) -> None:
    trainer.step(1)
    trainer.save(0.5)
    await trainer.wait_for_stop()
    trainer.end(RunEnd.STOPPED)


async def test_a_cancelled_training_is_ended_and_gives_its_gpus_back(house: House) -> None:
    house.engine.default = obeys
    job = await house.start()
    await house.until(lambda: bool(house.hub.commits))
    assert (await house.jobs.cancel(job)).state is JobState.CANCELLED
    row = await house.over_within(job)
    assert (row.state, row.end_reason) == (JobState.CANCELLED, EndReason.CANCELLED)
    assert row.submission is not None, "what is published stays"
    (attempt,) = await house.attempts(job)
    assert attempt.end_reason is EndReason.CANCELLED
    assert not house.engine.runs
    assert not house.fleet.ledger.holds


async def test_a_training_that_will_not_end_is_killed_when_its_job_is_cancelled(house: House) -> None:
    async def deaf(_: Trainer) -> None:
        await asyncio.sleep(60)

    house.engine.default = deaf
    job = await house.start()
    await house.until(lambda: bool(house.engine.submitted))
    await house.jobs.cancel(job)
    await house.over_within(job)
    assert [force for _, force in house.engine.stops][-1] is True
    assert not house.engine.runs


async def test_a_cancelled_download_ends_at_once(house: House) -> None:
    house.inputs.troubles = [60.0]
    job = await house.start()
    await asyncio.sleep(0.05)
    await house.jobs.cancel(job)
    assert (await house.over_within(job)).state is JobState.CANCELLED
    assert house.engine.submitted == []
    assert house.inputs.released == [job]


async def test_what_is_over_can_not_be_cancelled(house: House) -> None:
    job = await house.start()
    await house.over_within(job)
    with pytest.raises(NotNow, match="over already"):
        await house.jobs.cancel(job)
    with pytest.raises(NotNow, match="only a failed or cancelled one"):
        await house.jobs.retry(job)
    with pytest.raises(NoSuchJob, match="no job 99"):
        await house.jobs.cancel(99)


async def test_a_failed_job_can_be_tried_again_with_its_attempts_forgotten(house: House) -> None:
    async def bad(trainer: Trainer) -> None:
        trainer.end(RunEnd.BAD_DATA)

    house.engine.scripts = [bad]
    job = await house.start()
    assert (await house.over_within(job)).state is JobState.FAILED
    assert (await house.jobs.retry(job)).state is JobState.QUEUED
    assert (await house.over_within(job)).state is JobState.DONE
    assert [one.number for one in await house.attempts(job)] == [1, 2]


async def test_a_validator_that_starts_a_failed_job_again_gets_another_try(house: House) -> None:
    async def bad(trainer: Trainer) -> None:
        trainer.end(RunEnd.BAD_DATA)

    house.engine.scripts = [bad]
    job = await house.start()
    await house.over_within(job)
    assert await house.start(name="repo-2") == job
    row = await house.over_within(job)
    assert row.state is JobState.DONE
    assert row.submission is not None
    assert row.submission.repo == "me/repo-2"


async def test_a_second_start_changes_the_name_of_what_is_being_trained(house: House) -> None:
    house.engine.default = obeys
    job = await house.start()
    await house.until(lambda: bool(house.hub.commits))
    assert await house.start(name="repo-2", seconds=5.0) == job
    row = await house.over_within(job)
    assert row.submission is not None
    assert row.submission.repo == "me/repo-2"
    assert house.hub.moves == [("me/repo-1", "me/repo-2")]
    assert len(house.engine.submitted) == 1


async def test_a_second_start_moves_what_is_published_already(house: House) -> None:
    job = await house.start()
    await house.over_within(job)
    await house.start(name="repo-2")
    row = await house.over_within(job)
    assert row.state is JobState.DONE
    assert row.submission is not None
    assert row.submission.repo == "me/repo-2"
    assert set(house.hub.repos) == {"me/repo-2"}
    assert len(house.engine.submitted) == 1


async def test_a_repeated_start_with_the_same_name_changes_nothing(house: House) -> None:
    release = asyncio.Event()

    async def waits(trainer: Trainer) -> None:
        await release.wait()
        trainer.save(0.5)
        trainer.end()

    house.engine.default = waits
    job = await house.start()
    await house.until(lambda: bool(house.engine.submitted))
    for _ in range(5):
        assert await house.start() == job
    release.set()
    assert (await house.over_within(job)).starts == 6
    assert len(house.engine.submitted) == 1
    assert len(house.hub.commits) == 1


async def test_changes_are_told_to_whoever_listens(house: House) -> None:
    seen: list[str] = []

    async def listen() -> None:
        async for change in house.parts.bus.listen():
            if change.kind == "job":
                seen.append(change.data["state"])

    listener = asyncio.create_task(listen())
    await asyncio.sleep(0)
    job = await house.start()
    await house.over_within(job)
    states = list(dict.fromkeys(seen))
    assert states == ["queued", "preparing", "training", "publishing", "done"]
    house.parts.bus.close()
    await listener


async def test_starts_that_come_at_the_same_instant_have_one_worker(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    class Counted(manager.Worker):
        async def run(self) -> None:
            begun.append(self.desk.row.id)
            await super().run()

    monkeypatch.setattr(manager, "Worker", Counted)
    house.inputs.troubles = [0.1]
    jobs = await asyncio.gather(*(house.start() for _ in range(8)))
    row = await house.over_within(jobs[0])
    assert (row.state, row.starts) == (JobState.DONE, 8)
    assert begun == [row.id]
    assert len(house.engine.submitted) == 1


async def test_a_start_while_the_worker_is_being_replaced_makes_no_second_one(house: House) -> None:
    async def deaf(_: Trainer) -> None:
        await asyncio.sleep(60)

    house.engine.default = deaf
    job = await house.start()
    await house.until(lambda: bool(house.engine.submitted))
    await asyncio.gather(house.jobs.cancel(job), *(house.jobs.started(job) for _ in range(5)))
    assert house.jobs.working == 1
    assert (await house.over_within(job)).state is JobState.CANCELLED
    # One that was left behind would wait for its training for a minute.
    await house.until(lambda: not [one for one in asyncio.all_tasks() if one.get_name() == f"job {job}"])


@pytest.mark.parametrize("names", [["repo-2"], ["repo-2", "repo-3"]])
async def test_a_name_that_changes_while_the_model_is_moved_is_the_one_in_the_end(
    house: House, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    job = await house.start()
    await house.over_within(job)
    move, going = house.hub.move, asyncio.Event()

    async def slow(*told: Any, **more: Any) -> Any:
        going.set()
        await asyncio.sleep(0.05)
        return await move(*told, **more)

    monkeypatch.setattr(house.hub, "move", slow)
    for name in names:
        going.clear()
        await house.start(name=name)
        await going.wait()
    await house.start(name="repo-9")
    row = await house.over_within(job)
    assert row.submission is not None
    assert row.submission.repo == "me/repo-9"
    assert set(house.hub.repos) == {"me/repo-9"}


async def test_a_start_that_is_noted_as_the_worker_leaves_is_not_lost(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon hears of a start a moment after it is in the books."""
    forget = house.hub.forget

    def at_the_last_moment(job_id: int) -> None:
        forget(job_id)
        if len(house.hub.forgotten) == 1:
            with house.books.reading() as db:
                assert db.execute("SELECT state FROM jobs").fetchone()[0] == "done"
            db = database.connect(house.books.path)
            db.execute("UPDATE jobs SET expected_repo_name = 'repo-7', lock_token = lock_token + 1")
            db.close()

    monkeypatch.setattr(house.hub, "forget", at_the_last_moment)
    job = await house.start()
    await house.until(lambda: "me/repo-7" in house.hub.repos)
    row = await house.over_within(job)
    assert row.submission is not None
    assert row.submission.repo == "me/repo-7"


async def test_a_run_that_could_not_be_ended_in_time_keeps_its_gpus_while_its_model_is_published(
    house: House,
) -> None:
    async def deaf(trainer: Trainer) -> None:
        trainer.save(0.5)
        await asyncio.sleep(60)

    house.engine.default = deaf
    job = await house.start()
    await house.until(lambda: bool(house.hub.commits))
    house.engine.gone = True
    await house.start(seconds=3)
    async with asyncio.timeout(CAP_S):
        while (await house.parts.book.load(job)).state is not JobState.DONE:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert [hold.kind for hold in house.fleet.ledger.holds] == [HoldKind.JOB]
    house.engine.gone = False
    await house.over_within(job)
    assert not house.engine.runs
    await house.until(lambda: not house.fleet.ledger.holds)


async def test_no_validator_gets_another_ones_repository(house: House) -> None:
    first = await house.start(name="repo-1")
    await house.over_within(first)
    before = dict(house.hub.repos)
    again = Start(
        task_id="theirs",
        task_type=TaskType.INSTRUCT,
        model="tiny/llama",
        hours=3 / 3600,
        expected_repo_name="repo-1",
        started_at=time.time(),
        request=json.dumps(request("theirs")).encode(),
    )
    started = await house.jobs.take(again, "5CiPPseXPECbkjWCa6MnjNokrgYjMqmKndv2rSnekmSK2DjL")
    row = await house.over_within(started.job_id)
    assert (row.state, row.submission) == (JobState.FAILED, None)
    assert "another validator" in row.detail
    assert house.hub.repos == before


async def test_a_deadline_that_is_put_off_while_something_is_waited_for_counts(house: House) -> None:
    house.inputs.troubles = [8.0]
    job = await house.start(seconds=6)
    await house.until(lambda: bool(not house.inputs.troubles))
    await house.start(seconds=60)
    assert (await house.over_within(job)).state is JobState.DONE


async def test_a_task_of_two_validators_is_named_by_its_jobs_number(house: House) -> None:
    first = await house.start()
    await house.over_within(first)
    own = Start("t1", TaskType.INSTRUCT, "tiny/llama", 1.0, None, time.time(), b"{}")
    second = await house.jobs.take(own, "5CiPPseXPECbkjWCa6MnjNokrgYjMqmKndv2rSnekmSK2DjL")
    with house.books.reading() as db:
        with pytest.raises(NoSuchJob, match="several validators"):
            work.find_job(db, "t1")
        assert work.find_job(db, str(first)).id == first
    await house.over_within(second.job_id)


async def test_a_model_that_is_not_where_the_books_have_it_is_published_anew(house: House) -> None:
    job = await house.start()
    await house.over_within(job)
    house.hub.repos["me/elsewhere"] = house.hub.repos.pop("me/repo-1")
    await house.start(name="repo-2")
    row = await house.over_within(job)
    assert row.submission is not None
    assert row.submission.repo == "me/repo-2"
    assert "me/repo-2" in house.hub.repos
