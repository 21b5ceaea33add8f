"""What happens to a job when the store, the disk, its folder or our own code fails."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from typing import Any
from unittest.mock import ANY

import pytest

from core.run_files import RunEnd
from miner.engines.base import EngineSpec, Why
from miner.jobs.ports import Fetched, StepFailed, Told, Wanted
from miner.jobs.states import EndReason, JobState
from miner.store import work
from tests.miner.jobs.house import EndedBy, House, Trainer


async def test_a_store_that_fails_while_a_failure_is_noted_is_waited_for(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    move, fails = work.move, 3

    def moved(db: sqlite3.Connection, job: int, token: int, state: JobState, now: float, **more: Any) -> Any:
        nonlocal fails
        if state is JobState.FAILED and fails:
            fails -= 1
            raise sqlite3.OperationalError("database or disk is full")
        return move(db, job, token, state, now, **more)

    monkeypatch.setattr(work, "move", moved)
    house.inputs.troubles = [StepFailed(EndReason.BAD_DATA, "no such column")] * 10
    job = await house.start()
    row = await house.over_within(job)
    assert (row.state, row.end_reason, fails) == (JobState.FAILED, EndReason.BAD_DATA, 0)
    await house.until(lambda: bool(house.over))


async def test_mistakes_that_lie_far_apart_do_not_end_a_job(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miner.jobs.worker._FORGIVEN_S", 0.0)
    fetch, fails = house.inputs.fetch, 4

    async def fetched(wanted: Wanted, told: Told) -> Fetched:
        nonlocal fails
        if fails:
            fails -= 1
            raise OSError(24, "too many open files")
        return await fetch(wanted, told)

    monkeypatch.setattr(house.inputs, "fetch", fetched)
    assert (await house.over_within(await house.start())).state is JobState.DONE


async def test_a_job_whose_folder_is_removed_while_it_trains_is_trained_anew(house: House) -> None:
    async def loses_its_folder(trainer: Trainer) -> None:
        shutil.rmtree(house.folder / "jobs")
        await trainer.stopped.wait()
        raise EndedBy(Why.STOPPED, 143)

    house.engine.scripts = [loses_its_folder]
    job = await house.start()
    row = await house.over_within(job)
    assert row.state is JobState.DONE, row
    assert [one.end_reason for one in await house.attempts(job)] == [EndReason.LOST, EndReason.TRAINED]
    assert len(house.inputs.fetched) == 2


async def test_a_run_that_nobody_can_be_told_of_any_more_is_ended_and_followed_by_another(
    house: House,
) -> None:
    async def waits(trainer: Trainer) -> None:
        await trainer.wait_for_stop()
        raise EndedBy(Why.STOPPED, 143)

    house.engine.scripts = [waits]
    job = await house.start()
    await house.until(lambda: bool(house.engine.submitted))
    await house.jobs.stop()
    shutil.rmtree(house.folder / f"jobs/{job}/told")
    await house.reborn()
    row = await house.over_within(job)
    assert row.state is JobState.DONE, row
    ends = [one.end_reason for one in await house.attempts(job)]
    assert ends == [EndReason.LOST, EndReason.TRAINED]
    assert house.engine.stops


async def test_a_stop_that_can_not_be_written_down_is_asked_of_the_engine_all_the_same(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async def waits(trainer: Trainer) -> None:
        trainer.save(0.5)
        await trainer.stopped.wait()
        trainer.end(RunEnd.STOPPED)

    monkeypatch.setattr("miner.watch.files.put", full)
    house.engine.scripts = [waits]
    await house.start()
    await house.until(lambda: bool(house.engine.submitted))
    job = await house.start(seconds=6)
    row = await house.over_within(job)
    assert row.state is JobState.DONE, row
    assert house.engine.stops


async def test_a_job_that_is_started_again_first_ends_the_run_that_it_was_given_up_with(
    house: House,
) -> None:
    async def waits(trainer: Trainer) -> None:
        await trainer.wait_for_stop()
        raise EndedBy(Why.STOPPED, 143)

    house.engine.scripts = [waits]
    job = await house.start()
    await house.until(lambda: bool(house.engine.submitted))
    house.engine.gone = True
    await house.start(seconds=2)
    await house.until(lambda: ("job_failed", ANY) in house.alerts)
    await house.start()
    await asyncio.sleep(0.05)
    assert len(await house.attempts(job)) == 1
    house.engine.gone = False
    assert (await house.over_within(job)).state is JobState.DONE
    first, second = await house.attempts(job)
    assert (first.end_reason, second.end_reason) == (EndReason.STOPPED, EndReason.TRAINED)


async def test_a_launch_that_is_cut_short_by_a_cancellation_leaves_nothing_running(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine asked in a thread starts what it was told to, however long ago one stopped waiting."""
    submit, asked = house.engine.submit, asyncio.Event()

    async def late(spec: EngineSpec) -> str:
        async def carried_out() -> str:
            await asyncio.sleep(0.1)
            return await submit(spec)

        asked.set()
        return await asyncio.shield(asyncio.ensure_future(carried_out()))

    async def waits(trainer: Trainer) -> None:
        await trainer.wait_for_stop()

    monkeypatch.setattr(house.engine, "submit", late)
    house.engine.default = waits
    job = await house.start()
    await asked.wait()
    await house.jobs.cancel(job)
    await house.over_within(job)
    await asyncio.sleep(0.15)
    assert len(house.engine.submitted) == 1
    assert not house.engine.runs
