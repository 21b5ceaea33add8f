"""The deadline comes, or the operator's end, whatever a job is at: it ends in time, holds nothing more, and
keeps what is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from core.domain.job_states import EndReason, JobState, StepFailed
from core.domain.keys import TaskKey
from miner.fleet.base import GpuOption
from miner.jobs.context import JobContext
from miner.jobs.recovery import sweep_orphans
from tests.miner.jobs.harness import CAP_S, FAST, JobsHarness, Trainer, open_harness

pytestmark = pytest.mark.process


#: From a first model, where there is to be one, to the deadline.
SECONDS = 4.0


async def while_inputs_are_fetched(harness: JobsHarness) -> None:
    harness.inputs.troubles = [600.0]


async def while_the_network_is_cut(harness: JobsHarness) -> None:
    harness.inputs.troubles = [StepFailed(EndReason.NETWORK, "cut")] * 10_000


async def while_others_have_the_gpus(harness: JobsHarness) -> None:
    harness.fleet.ledger.request(TaskKey("v", "other"), [GpuOption(4)], now=0.0, until=time.time() + 600)
    harness.fleet.schedule()


async def while_the_backend_is_gone(harness: JobsHarness) -> None:
    harness.backend.gone = True


async def trains_for_ever(trainer: Trainer) -> None:
    trainer.step(1)
    await asyncio.sleep(600)


async def before_a_first_model(harness: JobsHarness) -> None:
    harness.backend.default = trains_for_ever


async def with_a_model(harness: JobsHarness) -> None:
    async def saves(trainer: Trainer) -> None:
        trainer.save(0.5)
        await trains_for_ever(trainer)

    harness.backend.default = saves


async def while_the_first_model_is_published(harness: JobsHarness) -> None:
    harness.hub.troubles = [600.0] * 10


def is_near(context: JobContext) -> bool:
    """The deadline: what is begun sooner has the time that there was then."""
    return context.row.deadline_at < time.time() + 100


async def while_a_better_model_is_published(harness: JobsHarness) -> None:
    async def trains(trainer: Trainer) -> None:
        trainer.save(0.5)
        await harness.until(lambda: bool(harness.hub.commits))
        await harness.until(lambda: all(is_near(context) for context in harness.jobs._contexts.values()))
        harness.hub.troubles = [600.0] * 10
        trainer.save(0.4, 2)
        trainer.end()

    harness.backend.default = trains


Stage = Callable[[JobsHarness], Awaitable[None]]
IN_TIME: list[Stage] = [with_a_model, while_a_better_model_is_published]
TOO_LATE: list[Stage] = [
    while_inputs_are_fetched,
    while_the_network_is_cut,
    while_others_have_the_gpus,
    while_the_backend_is_gone,
    before_a_first_model,
    while_the_first_model_is_published,
]
STAGES = [*IN_TIME, *TOO_LATE]


async def at_once(tmp_path: Path, one: Callable[[JobsHarness, Stage], Awaitable[None]]) -> None:
    """Every stage in a harness of its own: most of it is waiting."""

    async def tried(stage: Stage) -> None:
        async with open_harness(tmp_path / stage.__name__, FAST) as harness:
            await stage(harness)
            await one(harness, stage)

    async with asyncio.TaskGroup() as group:
        for stage in STAGES:
            group.create_task(tried(stage), name=stage.__name__)


async def test_the_deadline_comes(tmp_path: Path) -> None:
    async def comes(harness: JobsHarness, stage: Stage) -> None:
        if stage in IN_TIME:
            await harness.start()
            await harness.until(lambda: bool(harness.hub.commits))
        job = await harness.start(seconds=SECONDS)
        async with asyncio.timeout(CAP_S):
            while not (row := await harness.row(job)).state.is_over:
                await asyncio.sleep(0.01)
        details = f"{stage.__name__}: {row}"
        assert row.ended_at is not None, details
        assert row.ended_at < row.deadline_at + CAP_S, details  # what it is at would take 600 s
        if stage in IN_TIME:
            assert (row.state, row.submission is not None) == (JobState.DONE, True), details
            assert row.submitted_at is not None, details
            assert row.submitted_at < row.deadline_at, details
        else:
            assert (row.state, row.submission) == (JobState.FAILED, None), details
            assert row.end_reason in (EndReason.DEADLINE, EndReason.STOPPED), details
        harness.backend.gone = False
        await harness.over_within(job)
        assert not harness.backend.runs, details
        assert set(harness.inputs.released) == {job}, details  # safe to repeat
        assert not [claim for claim in harness.fleet.queue() if claim.key.task_id != "other"], details
        assert all(hold.key.task_id == "other" for hold in harness.fleet.ledger.reservations), details

    await at_once(tmp_path, comes)


async def test_the_operator_ends_it(tmp_path: Path) -> None:
    async def ends(harness: JobsHarness, stage: Stage) -> None:
        job = await harness.start(seconds=3600)
        await asyncio.sleep(0.3)  # as far as it comes by then: it may be ended at any point
        row = await harness.row(job)
        assert not row.state.is_over, stage.__name__
        await harness.jobs.cancel(job)
        harness.backend.gone = False
        row = await harness.over_within(job)
        details = f"{stage.__name__}: {row}"
        assert (row.state, row.end_reason) == (JobState.CANCELLED, EndReason.CANCELLED), details
        assert all(attempt.ended_at for attempt in await harness.attempts(job)), details
        assert all(run.task.done() for run in harness.backend.runs.values()), details
        await sweep_orphans(harness.services)  # a run that was just ended, and not yet removed
        assert not harness.backend.runs, details
        assert set(harness.inputs.released) == {job}, details  # safe to repeat

    await at_once(tmp_path, ends)
