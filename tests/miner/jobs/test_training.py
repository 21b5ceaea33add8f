"""The deadline, in every stage: what there is, is published in time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from core.progress import EvalEvent, NoteEvent, StepEvent, SubmissionEvent
from core.run_files import RunEnd, Score
from miner.engines.base import EngineSpec, NoSpace, Unreachable
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason, JobState
from miner.store import work
from tests.miner.jobs.house import CAP_S, FAST, House, Trainer, opened

#: What a job that is running gets to its deadline, and what of it comes after its submission at least.
SECONDS, MARGIN = 6.0, 0.5


@pytest.fixture
async def house(tmp_path):  # type: ignore[no-untyped-def]
    async with opened(tmp_path / "data", replace(FAST, margin_s=MARGIN, grace_s=0.75)) as made:
        yield made


async def started(house: House, seconds: float) -> int:
    """Running, with so much time from now on: how long a launch takes is not what these tests are about."""
    await house.start()
    await house.until(lambda: len(house.engine.submitted) == 1)
    return await house.start(seconds=seconds)


async def ends_in_time(house: House, job: int) -> None:
    row = await house.over_within(job)
    assert (row.state, row.end_reason) == (JobState.DONE, EndReason.PUBLISHED), row.detail
    repo, at = house.hub.commits[-1]
    assert repo == "me/repo-1"
    assert at <= row.deadline_at - MARGIN


async def test_a_training_that_is_asked_to_end_saves_and_is_published(house: House) -> None:
    async def obeys(trainer: Trainer) -> None:
        trainer.step(1)
        await trainer.wait_for_stop()
        trainer.save(0.5)
        trainer.end(RunEnd.CLOCK)

    house.engine.scripts = [obeys]
    job = await started(house, SECONDS)
    await ends_in_time(house, job)
    assert [force for _, force in house.engine.stops] == [False]


async def test_a_training_that_ignores_its_time_is_killed_and_its_best_is_published(house: House) -> None:
    async def deaf(trainer: Trainer) -> None:
        trainer.save(0.5)
        while True:
            await asyncio.sleep(0.01)
            trainer.say(StepEvent(t=time.time(), step=1))

    house.engine.scripts = [deaf]
    job = await started(house, SECONDS)
    await ends_in_time(house, job)
    assert [force for _, force in house.engine.stops] == [False, True]


async def test_what_an_engine_that_is_gone_runs_is_published_all_the_same(house: House) -> None:
    async def deaf(trainer: Trainer) -> None:
        trainer.save(0.5)
        house.engine.gone = True
        await asyncio.sleep(60)

    house.engine.scripts = [deaf]
    job = await started(house, SECONDS)
    async with asyncio.timeout(CAP_S):
        while (row := await house.parts.book.load(job)).state is not JobState.DONE:
            await asyncio.sleep(0.01)
    assert house.hub.commits[-1][1] <= row.deadline_at - MARGIN
    assert (await house.attempts(job))[0].ended_at is None
    house.engine.gone = False
    await house.over_within(job)  # and once it answers, what still runs is ended
    assert (await house.attempts(job))[0].ended_at is not None
    assert not house.fleet.ledger.holds


async def test_a_full_disk_of_the_engine_is_told_as_one_and_waited_for(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, refused = house.engine.submit, []

    async def full(spec: EngineSpec) -> str:
        if len(refused) < 2:
            refused.append(spec.key)
            raise NoSpace("Docker's disk is full")
        return await submit(spec)

    monkeypatch.setattr(house.engine, "submit", full)
    job = await started(house, 60.0)
    row = await house.over_within(job)
    assert row.state is JobState.DONE
    steps = await house.parts.book.read(lambda connection: work.steps(connection, job))
    launches = [step.detail for step in steps if step.name == "launch"]
    assert len(launches) == 3
    assert all("disk is full" in (detail or "") for detail in launches[:2])


async def test_a_launch_whose_answer_never_came_is_ended_when_the_engine_is_back(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = house.engine.submit

    async def silent(spec: EngineSpec) -> str:
        house.engine.gone = False
        await submit(spec)
        house.engine.gone = True
        raise Unreachable("no answer")

    async def long(trainer: Trainer) -> None:
        await trainer.wait_for_stop()

    monkeypatch.setattr(house.engine, "submit", silent)
    house.engine.default = long
    job = await started(house, 2.0)
    async with asyncio.timeout(CAP_S):
        while (row := await house.parts.book.load(job)).state is not JobState.FAILED:
            await asyncio.sleep(0.01)
    assert row.end_reason is EndReason.DEADLINE
    assert house.engine.runs
    house.engine.gone = False
    await house.over_within(job)
    assert not house.engine.runs
    assert len(house.engine.submitted) == 1


async def test_a_deadline_while_the_training_is_between_two_attempts_publishes_the_first_ones_model(
    house: House,
) -> None:
    near = asyncio.Event()

    async def saves_and_hangs_the_fleet(trainer: Trainer) -> None:
        await near.wait()
        trainer.save(0.5)
        house.inputs.troubles = [60.0]
        trainer.end(RunEnd.NAN)

    house.engine.default = saves_and_hangs_the_fleet
    job = await started(house, SECONDS)
    near.set()
    await ends_in_time(house, job)


async def test_a_deadline_before_anything_was_fetched_is_said_so(house: House) -> None:
    house.inputs.troubles = [60.0]
    job = await house.start(seconds=3.0)
    row = await house.over_within(job)
    assert (row.state, row.end_reason) == (JobState.FAILED, EndReason.DEADLINE)
    assert "fetch was not over in time" in row.detail


async def test_a_network_that_stays_away_until_the_deadline_is_named_in_the_end(house: House) -> None:
    house.inputs.troubles = [StepFailed(EndReason.NETWORK, "no route to host")] * 1000
    job = await house.start(seconds=3.0)
    row = await house.over_within(job)
    assert (row.state, row.end_reason) == (JobState.FAILED, EndReason.DEADLINE)
    assert "no route to host" in row.detail


async def test_a_deadline_while_waiting_for_gpus_gives_the_place_in_the_queue_back(house: House) -> None:
    hold = asyncio.Event()

    async def keeps(trainer: Trainer) -> None:
        await hold.wait()

    house.engine.scripts = [keeps]
    first = await house.start(task_id="t0", name="r0")
    await house.until(lambda: len(house.engine.submitted) == 1)
    job = await house.start(seconds=1.0)
    row = await house.over_within(job)
    assert (row.state, row.end_reason) == (JobState.FAILED, EndReason.DEADLINE)
    assert house.fleet.queue() == []
    hold.set()
    await house.jobs.cancel(first)


async def test_a_hub_that_is_down_until_the_deadline_costs_the_job_unless_a_model_is_there(
    house: House,
) -> None:
    down = StepFailed(EndReason.NETWORK, "503 from the hub")
    house.hub.troubles = [down] * 10_000
    await house.start()
    await house.until(lambda: len(house.hub.troubles) < 10_000 - 3)
    job = await house.start(seconds=2.0)
    row = await house.over_within(job)
    assert (row.state, row.end_reason) == (JobState.FAILED, EndReason.DEADLINE)
    assert "503 from the hub" in row.detail


async def test_an_early_model_stands_when_the_last_upload_does_not_make_it(house: House) -> None:
    async def saves_twice(trainer: Trainer) -> None:
        trainer.save(0.9, 1)
        while not house.hub.commits:
            await asyncio.sleep(0.005)
        house.hub.troubles = [StepFailed(EndReason.NETWORK, "gone")] * 10_000
        trainer.save(0.5, 2)
        trainer.end()

    house.engine.scripts = [saves_twice]
    await house.start()
    await house.until(lambda: bool(house.hub.troubles))
    job = await house.start(seconds=2.0)
    row = await house.over_within(job)
    assert (row.state, row.end_reason) == (JobState.DONE, EndReason.PUBLISHED)
    assert "published early" in row.detail
    assert len(house.hub.commits) == 1


async def test_a_second_start_with_less_time_ends_the_training_sooner(house: House) -> None:
    async def obeys(trainer: Trainer) -> None:
        trainer.step(1)
        await trainer.wait_for_stop()
        trainer.save(0.5)
        trainer.end(RunEnd.STOPPED)

    house.engine.scripts = [obeys]
    job = await house.start(seconds=3600)
    await house.until(lambda: len(house.engine.submitted) == 1)
    await house.start(seconds=SECONDS)
    row = await house.over_within(job)
    assert row.state is JobState.DONE
    assert house.hub.commits[-1][1] <= row.deadline_at - MARGIN


async def test_after_fifty_steps_the_job_says_when_it_will_end(house: House) -> None:
    async def steps(trainer: Trainer) -> None:
        for number in range(1, 70):
            trainer.step(number, 100)
            await asyncio.sleep(0.005)
        await trainer.wait_for_stop()

    house.engine.scripts = [steps]
    job = await house.start()
    live = house.jobs.live(job)
    assert live is not None
    await house.until(lambda: live.ends_at is not None)
    assert live.ends_at is not None
    assert time.time() - 60 < live.ends_at < time.time() + 3600
    await house.jobs.cancel(job)
    await house.over_within(job)


async def test_a_training_may_say_anything(house: House) -> None:
    async def raves(trainer: Trainer) -> None:
        for number in range(400):
            trainer.say(NoteEvent(t=time.time(), kind="x", text=f"{number} " * 50))
        for t, number in ((1e300, 1), (-1e300, 10**300), (0.0, 10**300 + 1), (1e-300, 10**300 + 60)):
            trainer.say(StepEvent(t=t, step=number, loss=1e308, ends_at=-1e308, tokens_s=-5))
            await asyncio.sleep(0.02)
        at = time.time()
        for number in range(1, 80):
            trainer.say(StepEvent(t=at + number, step=2 * 10**300 + number))
        trainer.say(EvalEvent(t=at, score=Score(value=1e308, step=1), seconds=1e308))
        for number in range(80, 200):
            trainer.say(StepEvent(t=at + number, step=2 * 10**300 + number))
            await asyncio.sleep(0.001)
        (Path(trainer.run.work_dir) / "real").mkdir()
        Path(trainer.run.submission_dir).symlink_to("/etc")
        trainer.say(SubmissionEvent(t=0, step=1))
        await asyncio.sleep(0.05)
        Path(trainer.run.submission_dir).unlink()
        trainer.save(0.5)
        trainer.end()

    house.engine.scripts = [raves]
    job = await house.start()
    row = await house.over_within(job)
    assert row.state is JobState.DONE, row
    assert len(house.engine.submitted) == 1


async def test_a_launch_that_outlives_its_deadline_is_waited_for_once_the_deadline_moves(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not made a second time beside the first, which the engine goes on with."""
    submit, let_go, calls = house.engine.submit, asyncio.Event(), 0

    async def slow(spec: EngineSpec) -> str:
        nonlocal calls
        calls += 1
        await let_go.wait()
        return await submit(spec)

    monkeypatch.setattr(house.engine, "submit", slow)
    job = await house.start(seconds=SECONDS)
    await house.until(lambda: calls == 1)
    live = house.jobs._desks[job]
    first = live.row.deadline_at
    await house.start(seconds=600.0)
    # Beyond the first deadline, when the step's time was up and it was gone on with.
    await asyncio.sleep(max(first - time.time(), 0.0) + 0.3)
    let_go.set()
    row = await house.over_within(job)
    assert (row.state, row.end_reason) == (JobState.DONE, EndReason.PUBLISHED), row.detail
    assert calls == 1
    assert len(house.engine.submitted) == 1
