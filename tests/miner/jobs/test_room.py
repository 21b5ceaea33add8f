from __future__ import annotations

import pytest

from miner.jobs.folder import JobFolder
from miner.jobs.room import Room
from miner.jobs.states import JobState
from tests.miner.jobs.house import House


async def test_what_finished_jobs_have_left_goes_after_a_while_or_when_room_is_needed(house: House) -> None:
    job = await house.start()
    row = await house.over_within(job)
    assert row.state is JobState.DONE
    folder = house.parts.data_dir / f"jobs/{job}"
    room = Room(house.parts.data_dir, house.parts.book, keep_s=3600)
    assert await room.tidy(house.parts.clock()) == 0
    assert (folder / "submission").is_dir()
    assert await room.make() > 0
    assert not (folder / "submission").exists()
    assert not (folder / "inputs").exists()
    assert (folder / "attempt_1/plan.json").exists()
    assert await room.make() == 0


async def test_a_job_that_begins_another_life_while_room_is_made_keeps_everything(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [await house.start(task_id=f"t{number}", name=f"r{number}") for number in range(2)]
    for job in jobs:
        await house.over_within(job)
    room = Room(house.parts.data_dir, house.parts.book, keep_s=0)
    strip = JobFolder.strip

    def slow(folder: JobFolder) -> int:
        room.used_again(jobs[1])
        return strip(folder)

    monkeypatch.setattr(JobFolder, "strip", slow)
    assert await room.make() > 0
    left = [(house.folder / f"jobs/{job}/submission").exists() for job in jobs]
    assert left == [False, True]


async def test_what_can_not_be_removed_keeps_nobody_from_going_on(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.over_within(await house.start())

    def fails(_folder: JobFolder) -> int:
        raise PermissionError(13, "not yours")

    monkeypatch.setattr(JobFolder, "strip", fails)
    assert await Room(house.parts.data_dir, house.parts.book, keep_s=0).make() == 0


async def test_jobs_that_go_on_keep_everything(house: House) -> None:
    house.inputs.troubles = [30.0]
    job = await house.start()
    inputs = house.parts.data_dir / f"jobs/{job}/inputs"
    inputs.mkdir(parents=True)
    (inputs / "half").write_text("x")
    room = Room(house.parts.data_dir, house.parts.book, keep_s=0)
    assert await room.make() == 0
    assert (inputs / "half").exists()


async def test_a_job_with_another_life_is_tidied_again(house: House) -> None:
    job = await house.start()
    await house.over_within(job)
    room = Room(house.parts.data_dir, house.parts.book, keep_s=0)
    await room.make()
    (house.parts.data_dir / f"jobs/{job}/inputs").mkdir()
    (house.parts.data_dir / f"jobs/{job}/inputs/again").write_text("xxx")
    assert await room.make() == 0
    room.used_again(job)
    assert await room.make() == 3
