"""What happens to a job when the store, the disk, its folder or our own code fails."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from typing import Any
from unittest.mock import ANY

import pytest

from core.domain.job_states import EndReason, JobState, ProgressCallback, StepFailed
from core.runs.run_files import RunEnd
from miner.backends.base import AttemptSpec, EndCause
from miner.inputs.fetch import FetchedInputs, JobTask
from miner.store import attempts
from tests.miner.jobs.harness import EndedBy, JobsHarness, Trainer, waits

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
