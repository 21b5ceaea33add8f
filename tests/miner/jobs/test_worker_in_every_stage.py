"""The deadline comes, or the operator's end, whatever a job is at: it ends in time, holds nothing more, and
keeps what is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from miner.fleet.base import TaskKey
from miner.jobs.desk import Desk
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason, JobState
from tests.miner.jobs.house import CAP_S, FAST, House, Trainer, opened

#: From a first model, where there is to be one, to the deadline.
SECONDS = 4.0


async def while_inputs_are_fetched(house: House) -> None:
    house.inputs.troubles = [600.0]


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
        await asyncio.sleep(600)

    house.engine.default = trains


async def with_a_model(house: House) -> None:
    async def trains(trainer: Trainer) -> None:
        trainer.save(0.5)
        await asyncio.sleep(600)

    house.engine.default = trains


async def while_the_first_model_is_published(house: House) -> None:
    house.hub.troubles = [600.0] * 10


def is_near(desk: Desk) -> bool:
    """The deadline: what is begun sooner has the time that there was then."""
    return desk.row.deadline_at < time.time() + 100


async def while_a_better_model_is_published(house: House) -> None:
    async def trains(trainer: Trainer) -> None:
        trainer.save(0.5)
        await house.until(lambda: bool(house.hub.commits))
        await house.until(lambda: all(is_near(desk) for desk in house.jobs._desks.values()))
        house.hub.troubles = [600.0] * 10
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
STAGES = [*IN_TIME, *TOO_LATE]


async def at_once(tmp_path: Path, one: Callable[[House, Stage], Awaitable[None]]) -> None:
    """Every stage in a house of its own: most of it is waiting."""

    async def tried(stage: Stage) -> None:
        async with opened(tmp_path / stage.__name__, FAST) as house:
            await stage(house)
            await one(house, stage)

    async with asyncio.TaskGroup() as group:
        for stage in STAGES:
            group.create_task(tried(stage), name=stage.__name__)


async def test_the_deadline_comes(tmp_path: Path) -> None:
    async def comes(house: House, stage: Stage) -> None:
        if stage in IN_TIME:
            await house.start()
            await house.until(lambda: bool(house.hub.commits))
        job = await house.start(seconds=SECONDS)
        async with asyncio.timeout(CAP_S):
            while not (row := await house.parts.book.load(job)).state.is_over:
                await asyncio.sleep(0.01)
        told = f"{stage.__name__}: {row}"
        assert row.ended_at is not None, told
        assert row.ended_at < row.deadline_at + CAP_S, told  # what it is at would take 600 s
        if stage in IN_TIME:
            assert (row.state, row.submission is not None) == (JobState.DONE, True), told
            assert row.submitted_at is not None, told
            assert row.submitted_at < row.deadline_at, told
        else:
            assert (row.state, row.submission) == (JobState.FAILED, None), told
            assert row.end_reason in (EndReason.DEADLINE, EndReason.STOPPED), told
        house.engine.gone = False
        await house.over_within(job)
        assert not house.engine.runs, told
        assert all(hold.key.task_id == "other" for hold in house.fleet.ledger.holds), told

    await at_once(tmp_path, comes)


async def test_the_operator_ends_it(tmp_path: Path) -> None:
    async def ends(house: House, stage: Stage) -> None:
        job = await house.start(seconds=3600)
        await asyncio.sleep(0.3)  # as far as it comes by then: it may be ended at any point
        row = await house.parts.book.load(job)
        assert not row.state.is_over, stage.__name__
        await house.jobs.cancel(job)
        house.engine.gone = False
        row = await house.over_within(job)
        told = f"{stage.__name__}: {row}"
        assert (row.state, row.end_reason) == (JobState.CANCELLED, EndReason.CANCELLED), told
        assert all(one.ended_at for one in await house.attempts(job)), told
        assert not house.engine.runs, told

    await at_once(tmp_path, ends)
