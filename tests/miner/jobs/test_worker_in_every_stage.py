"""The deadline comes, or the operator's end, whatever a job is at: it ends in time, holds nothing more, and
keeps what is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from miner.fleet.base import TaskKey
from miner.jobs.desk import Desk
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason, JobState
from tests.miner.jobs.house import House, Trainer

#: From a first model, where there is to be one, to the deadline.
SECONDS = 4.0


async def while_inputs_are_fetched(house: House) -> None:
    house.inputs.troubles = [60.0]


async def while_the_network_is_cut(house: House) -> None:
    house.inputs.troubles = [StepFailed(EndReason.NETWORK, "cut")] * 10_000


async def while_others_have_the_gpus(house: House) -> None:
    house.fleet.ledger.ask(TaskKey("v", "other"), [4], now=0.0, until=time.time() + 600, priority=0.0)
    house.fleet.arrange()


async def while_the_engine_is_gone(house: House) -> None:
    house.engine.gone = True


async def before_a_first_model(house: House) -> None:
    async def trains(trainer: Trainer) -> None:
        trainer.step(1)
        await asyncio.sleep(60)

    house.engine.default = trains


async def with_a_model(house: House) -> None:
    async def trains(trainer: Trainer) -> None:
        trainer.save(0.5)
        await asyncio.sleep(60)

    house.engine.default = trains


async def while_the_first_model_is_published(house: House) -> None:
    house.hub.troubles = [60.0] * 10


def is_near(desk: Desk) -> bool:
    """The deadline: what is begun sooner has the time that there was then."""
    return desk.row.deadline_at < time.time() + 100


async def while_a_better_model_is_published(house: House) -> None:
    async def trains(trainer: Trainer) -> None:
        trainer.save(0.5)
        await house.until(lambda: bool(house.hub.commits))
        await house.until(lambda: all(is_near(desk) for desk in house.jobs._desks.values()))
        house.hub.troubles = [60.0] * 10
        trainer.save(0.4, 2)
        trainer.end()

    house.engine.default = trains


Stage = Callable[[House], Awaitable[None]]
IN_TIME: list[Stage] = [with_a_model, while_a_better_model_is_published]
TOO_LATE: list[Stage] = [
    while_inputs_are_fetched,
    while_the_network_is_cut,
    while_others_have_the_gpus,
    while_the_engine_is_gone,
    before_a_first_model,
    while_the_first_model_is_published,
]


@pytest.mark.parametrize("stage", [*IN_TIME, *TOO_LATE], ids=lambda stage: stage.__name__)
async def test_the_deadline_comes(house: House, stage: Stage) -> None:
    await stage(house)
    if stage in IN_TIME:
        await house.start()
        await house.until(lambda: bool(house.hub.commits))
    job = await house.start(seconds=SECONDS)
    async with asyncio.timeout(SECONDS + 30):
        while not (row := await house.parts.book.load(job)).state.is_over:
            await asyncio.sleep(0.01)
    assert row.ended_at is not None
    assert row.ended_at <= row.deadline_at + 5
    if stage in IN_TIME:
        assert (row.state, row.submission is not None) == (JobState.DONE, True), row
        assert row.submitted_at is not None
        assert row.submitted_at < row.deadline_at
    else:
        assert (row.state, row.submission) == (JobState.FAILED, None), row
        assert row.end_reason in (EndReason.DEADLINE, EndReason.STOPPED)
    house.engine.gone = False
    await house.over_within(job)
    assert not house.engine.runs
    assert all(hold.key.task_id == "other" for hold in house.fleet.ledger.holds)


@pytest.mark.parametrize("stage", [*IN_TIME, *TOO_LATE], ids=lambda stage: stage.__name__)
async def test_the_operator_ends_it(house: House, stage: Stage) -> None:
    await stage(house)
    job = await house.start(seconds=60)
    await asyncio.sleep(0.3)
    row = await house.parts.book.load(job)
    assert not row.state.is_over
    await house.jobs.cancel(job)
    house.engine.gone = False
    row = await house.over_within(job)
    assert (row.state, row.end_reason) == (JobState.CANCELLED, EndReason.CANCELLED)
    assert all(one.ended_at for one in await house.attempts(job))
    assert not house.engine.runs
    assert all(hold.key.task_id == "other" for hold in house.fleet.ledger.holds)
    assert house.inputs.released == [job]
    assert not [one for one in asyncio.all_tasks() if "upload" in one.get_name()]
