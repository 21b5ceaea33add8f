"""The daemon dies and comes back: nothing is lost and nothing is done twice."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from core.run_files import RunEnd
from miner.engines.base import EngineSpec
from miner.jobs.states import EndReason, JobState
from miner.store import database
from tests.miner.jobs.house import CAP_S, House, Trainer

COPIED = (
    "validator, task_type, model, hours, state, end_reason, started_at, deadline_at, starts, request, "
    "lock_token, updated_at"
)


async def slow(trainer: Trainer) -> None:
    for number in range(1, 11):
        trainer.step(number, 10)
        await asyncio.sleep(0.02)
        if number in (3, 6):
            trainer.save(1.0 / number, number)
    trainer.save(0.05, 10)
    trainer.end()


async def launched(house: House, job: int) -> None:
    """Until the books know that the engine has it."""
    async with asyncio.timeout(CAP_S):
        while not (attempts := await house.attempts(job)) or attempts[0].ref is None:
            await asyncio.sleep(0.005)


async def test_what_runs_is_adopted_with_its_gpus(house: House) -> None:
    seen = asyncio.Event()

    async def waits(trainer: Trainer) -> None:
        await seen.wait()
        trainer.save(0.5)
        trainer.end()

    house.engine.default = waits
    job = await house.start()
    await launched(house, job)
    await house.reborn()
    assert house.inputs.kept == {job}
    assert [hold.gpus for hold in house.fleet.ledger.holds] == [house.engine.submitted[0].gpus]
    seen.set()
    assert (await house.over_within(job)).state is JobState.DONE
    assert len(house.engine.submitted) == 1


async def test_a_daemon_that_dies_at_each_turn_launches_once_and_publishes_the_best(house: House) -> None:
    """As the run begins, and between its models."""
    turn, go_on = asyncio.Event(), asyncio.Event()

    async def by_turns(trainer: Trainer) -> None:
        for step, score in ((3, 0.3), (6, 0.2), (10, 0.05)):
            trainer.step(step, 10)
            turn.set()
            await go_on.wait()
            go_on.clear()
            trainer.save(score, step)
        trainer.end()

    house.engine.default = by_turns
    job = await house.start()
    for _ in range(3):
        await turn.wait()
        turn.clear()
        await house.reborn()
        go_on.set()
    row = await house.over_within(job)
    assert row.state is JobState.DONE
    assert len(house.engine.submitted) == 1
    assert house.hub.repos["me/repo-1"]["adapter_model.safetensors"] == b"t1 0.05 10"
    assert len(house.hub.commits) <= 3, "each model once at most"


@pytest.mark.parametrize("seed", range(12))
async def test_a_daemon_that_dies_again_and_again_launches_once_and_publishes_the_best(
    house: House, seed: int
) -> None:
    random = Random(seed)
    house.engine.default = slow
    job = await house.start()
    for _ in range(4):
        await asyncio.sleep(random.uniform(0, 0.12))
        await house.reborn()
    row = await house.over_within(job)
    assert row.state is JobState.DONE
    assert len(house.engine.submitted) == 1
    assert house.hub.repos["me/repo-1"]["adapter_model.safetensors"] == b"t1 0.05 10"
    assert len(house.hub.commits) <= 3, "each model once at most"


async def test_what_ended_while_the_daemon_was_away_is_published(house: House) -> None:
    job = await house.start()
    await house.until(lambda: bool(house.engine.submitted))
    await house.jobs.stop()
    await house.until(lambda: all(run.task.done() for run in house.engine.runs.values()))
    await house.reborn()
    assert (await house.over_within(job)).state is JobState.DONE
    assert len(house.engine.submitted) == 1


async def test_what_vanished_is_launched_anew(house: House) -> None:
    async def waits(trainer: Trainer) -> None:
        await trainer.wait_for_stop()

    house.engine.scripts = [waits]
    job = await house.start()
    await launched(house, job)
    await house.jobs.stop()
    for run in house.engine.runs.values():
        run.task.cancel()
    house.engine.runs.clear()
    for leftover in house.parts.data_dir.glob("jobs/*/attempt_1/exit.json"):
        leftover.unlink()
    await house.reborn()
    assert (await house.over_within(job)).state is JobState.DONE
    ends = [one.end_reason for one in await house.attempts(job)]
    assert ends == [EndReason.LOST, EndReason.TRAINED]


async def test_an_attempt_in_the_books_that_the_engine_never_heard_of_is_launched_from_its_files(
    house: House,
) -> None:
    house.engine.gone = True
    job = await house.start()
    async with asyncio.timeout(CAP_S):
        while not await house.attempts(job):
            await asyncio.sleep(0.01)
    await house.jobs.stop()
    house.engine.gone = False
    await house.reborn()
    assert (await house.over_within(job)).state is JobState.DONE
    assert [one.number for one in await house.attempts(job)] == [1]
    assert len(house.engine.submitted) == 1


async def test_a_submit_whose_answer_was_lost_is_not_submitted_twice(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = house.engine.submit

    async def never_answers(spec: EngineSpec) -> str:
        await submit(spec)
        await asyncio.sleep(60)
        return ""

    monkeypatch.setattr(house.engine, "submit", never_answers)
    job = await house.start()
    await house.until(lambda: bool(house.engine.submitted))
    await house.jobs.stop()
    monkeypatch.setattr(house.engine, "submit", submit)
    await house.reborn()
    assert (await house.over_within(job)).state is JobState.DONE
    assert len(house.engine.submitted) == 1


async def test_runs_of_nobody_are_ended_and_removed_and_others_left_alone(
    house: House, tmp_path: Path
) -> None:
    async def waits(trainer: Trainer) -> None:
        await asyncio.sleep(60)

    house.engine.default = waits
    job = await house.start()
    await house.until(lambda: bool(house.engine.submitted))
    mine = house.engine.submitted[0]
    stranger = EngineSpec(key="99-1-abcdef01", argv=("python",), run_dir=tmp_path / "stranger")
    stranger.run_dir.mkdir()
    (stranger.run_dir / "run.json").write_bytes((mine.run_dir / "run.json").read_bytes())
    await house.engine.submit(stranger)
    await house.reborn()
    await house.until(lambda: stranger.key in house.engine.removed)
    assert mine.key in house.engine.runs
    assert (stranger.key, True) in house.engine.stops
    await house.jobs.cancel(job)
    await house.over_within(job)


async def test_an_engine_that_is_gone_at_the_start_holds_nobody_up(house: House) -> None:
    house.engine.default = slow
    job = await house.start()
    await house.until(lambda: bool(house.engine.submitted))
    house.engine.gone = True
    await house.reborn()
    await asyncio.sleep(0.1)
    house.engine.gone = False
    assert (await house.over_within(job)).state is JobState.DONE
    assert len(house.engine.submitted) == 1


async def test_a_job_that_was_cancelled_while_its_run_could_not_be_ended_is_ended_later(house: House) -> None:
    async def waits(trainer: Trainer) -> None:
        await trainer.wait_for_stop()
        trainer.end(RunEnd.STOPPED)

    house.engine.default = waits
    job = await house.start()
    await launched(house, job)
    house.engine.gone = True
    await house.jobs.cancel(job)
    await asyncio.sleep(0.05)
    await house.reborn()
    house.engine.gone = False
    row = await house.over_within(job)
    assert row.state is JobState.CANCELLED
    assert not house.engine.runs


async def test_a_name_that_changed_while_the_daemon_was_away_is_made_good(house: House) -> None:
    job = await house.start()
    await house.over_within(job)
    await house.jobs.stop()
    await house.start(name="repo-2")
    await house.reborn()
    async with asyncio.timeout(CAP_S):
        while True:
            row = await house.parts.book.load(job)
            if row.submission and row.submission.repo == "me/repo-2":
                break
            await asyncio.sleep(0.01)
    assert len(house.engine.submitted) == 1


async def test_a_thousand_jobs_in_the_books_and_four_running_are_taken_up_at_once(house: House) -> None:
    first = await house.start(task_id="over")
    await house.over_within(first)
    with closing(database.connect(house.books.path)) as db:
        db.executemany(
            f"INSERT INTO jobs (task_id, {COPIED}) SELECT ?, {COPIED} FROM jobs WHERE id = ?",
            [(f"old{number}", first) for number in range(1000)],
        )
    launched = len(house.engine.submitted)
    hold = asyncio.Event()

    async def waits(trainer: Trainer) -> None:
        await hold.wait()
        trainer.save(0.5)
        trainer.end()

    house.engine.default = waits
    jobs = []
    for number in range(4):
        jobs.append(await house.start(task_id=f"live{number}", name=f"live{number}", model="tiny/llama"))
    await house.until(lambda: len(house.engine.submitted) > launched)
    await house.reborn()
    assert house.jobs.working == 4
    hold.set()
    for job in jobs:
        assert (await house.over_within(job)).state is JobState.DONE
    assert len(house.engine.submitted) == launched + 4
