"""What happens to a job when the store, the disk, its folder or our own code fails."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from core.domain.job_states import EndReason, JobState, ProgressCallback, StepFailed
from core.domain.keys import TaskKey
from core.runs.run_files import RunEnd
from miner.backends.base import AttemptSpec, EndCause
from miner.fleet.base import GpuOption
from miner.inputs.fetch import FetchedInputs, JobTask
from miner.jobs.context import JobContext
from miner.jobs.manager import sweep_orphans
from miner.store import attempts
from tests.miner.jobs.harness import CAP_S, FAST, EndedBy, JobsHarness, Trainer, open_harness, waits

pytestmark = pytest.mark.process


async def stopped_when_asked(trainer: Trainer) -> None:
    await trainer.wait_for_stop()
    raise EndedBy(EndCause.STOPPED, 143)


async def test_a_store_that_fails_while_a_failure_is_noted_is_waited_for(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    move, fails = attempts.set_job_state, 3

    def moved(db: sqlite3.Connection, job: int, token: int, state: JobState, now: float, **more: Any) -> Any:
        nonlocal fails
        if state is JobState.FAILED and fails:
            fails -= 1
            raise sqlite3.OperationalError("database or disk is full")
        return move(db, job, token, state, now, **more)

    monkeypatch.setattr(attempts, "set_job_state", moved)
    harness.inputs.troubles = [StepFailed(EndReason.BAD_DATA, "no such column")] * 10
    job = await harness.start()
    await harness.failed(job, EndReason.BAD_DATA)
    assert fails == 0
    await harness.until(lambda: bool(harness.over))


async def test_mistakes_that_lie_far_apart_do_not_end_a_job(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miner.jobs.worker._BUG_WINDOW_S", 0.0)
    fetch, fails = harness.inputs.fetch, 4

    async def fetched(task: JobTask, on_progress: ProgressCallback) -> FetchedInputs:
        nonlocal fails
        if fails:
            fails -= 1
            raise OSError(24, "too many open files")
        return await fetch(task, on_progress)

    monkeypatch.setattr(harness.inputs, "fetch", fetched)
    await harness.done(await harness.start())


async def test_a_job_whose_folder_is_removed_while_it_trains_is_trained_anew(harness: JobsHarness) -> None:
    async def loses_its_folder(trainer: Trainer) -> None:
        shutil.rmtree(harness.folder / "jobs")
        await trainer.stopped.wait()
        raise EndedBy(EndCause.STOPPED, 143)

    harness.backend.scripts = [loses_its_folder]
    job = await harness.start()
    await harness.done(job)
    assert await harness.ends(job) == [EndReason.LOST, EndReason.TRAINED]
    assert len(harness.inputs.fetched) == 2


async def test_a_run_that_nobody_knows_any_more_is_ended_and_followed_by_another(
    harness: JobsHarness,
) -> None:
    harness.backend.scripts = [stopped_when_asked]
    job = await harness.launched()
    await harness.jobs.stop()
    shutil.rmtree(harness.folder / f"jobs/{job}/orders")
    await harness.restart()
    await harness.done(job)
    assert await harness.ends(job) == [EndReason.LOST, EndReason.TRAINED]
    assert harness.backend.stops


async def test_a_stop_that_cannot_be_written_down_is_asked_of_the_backend_all_the_same(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async def stops(trainer: Trainer) -> None:
        trainer.save(0.5)
        await trainer.stopped.wait()
        trainer.end(RunEnd.STOPPED)

    monkeypatch.setattr("miner.support.untrusted_files.write_untrusted", full)
    harness.backend.scripts = [stops]
    await harness.launched()
    await harness.done(await harness.start(seconds=12))
    assert harness.backend.stops


async def test_a_job_that_is_started_again_first_ends_the_run_that_it_was_given_up_with(
    harness: JobsHarness,
) -> None:
    harness.backend.scripts = [stopped_when_asked]
    job = await harness.launched()
    harness.backend.gone = True
    await harness.start(seconds=2)
    await harness.until(lambda: ("job_failed", ANY) in harness.alerts)
    await harness.start()
    await asyncio.sleep(0.05)
    assert len(await harness.attempts(job)) == 1
    harness.backend.gone = False
    await harness.done(job)
    assert await harness.ends(job) == [EndReason.STOPPED, EndReason.TRAINED]


async def test_a_launch_that_is_cut_short_by_a_cancellation_leaves_nothing_running(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend asked in a thread starts the run, however long ago somebody stopped waiting."""
    submit, asked = harness.backend.submit, asyncio.Event()

    async def carried_out(spec: AttemptSpec) -> str:
        asked.set()
        await asyncio.sleep(0.1)
        return await submit(spec)

    async def late(spec: AttemptSpec) -> str:
        return await asyncio.shield(asyncio.ensure_future(carried_out(spec)))

    monkeypatch.setattr(harness.backend, "submit", late)
    harness.backend.default = waits
    job = await harness.start()
    await asked.wait()
    await harness.jobs.cancel(job)
    await harness.over_within(job)
    await harness.until(lambda: bool(harness.backend.submitted))
    assert len(harness.backend.submitted) == 1
    assert not harness.backend.runs


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
