"""The disk is full while something comes or is saved: said so, nothing corrupt, over when it is over."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio

from core.domain.job_states import EndReason, JobState
from tests.doubles.required import missing
from tests.integration.disks import Disk, small_disk
from tests.integration.jobs.field import INSTANTS, SEED, Field, Files, process_field


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "data", megabytes=24) as disk:
        if disk is None:
            missing("no file system can be mounted here")
        yield disk


@pytest_asyncio.fixture
async def field(disk: Disk, files: Files, tmp_path: Path) -> AsyncIterator[Field]:
    async with process_field(tmp_path / "data", files) as field:
        yield field


def assert_dataset_is_whole(field: Field, files: Files, job: int, attempt: int) -> None:
    """The data that an attempt was given, but for the first row: it says what to do."""
    data = Path(field.run(job, attempt)["data_path"]).read_bytes()
    dataset = next(name for name in files.datasets if field.run(job, attempt)["task_id"] == name)
    assert json.loads(data)[1:] == json.loads(files.datasets[dataset])[1:]


async def test_a_disk_that_fills_up_while_a_model_is_saved_costs_an_attempt_and_no_more(field: Field) -> None:
    job = await field.start("t1", {"1": {"save": [2], "at": {"4": "fill"}}, "*": {"steps": 4}})
    await field.published(job)
    assert await field.ends(job) == [EndReason.DISK_FULL, EndReason.TRAINED]


@pytest.mark.thorough
async def test_at_whatever_save_the_disk_is_full_what_was_saved_before_is_whole(field: Field) -> None:
    random = Random(SEED)
    for number in range(INSTANTS):
        full = random.randint(1, 12)
        saves = list(range(1, 13, random.randint(1, 3)))
        first = {"steps": 12, "save": saves, "checkpoint": saves, "at": {str(full): "fill"}}
        job = await field.start(f"t{number}", {"1": first, "*": {"steps": 4}})
        await field.published(job)
        assert (await field.ends(job))[-1] == EndReason.TRAINED, f"full at step {full}"


@pytest.mark.parametrize("count", [40, 8000], ids=["before it comes", "halfway"])
async def test_a_disk_that_is_full_while_a_dataset_comes_is_waited_for(
    field: Field, disk: Disk, files: Files, count: int
) -> None:
    halfway = count == 8000
    files.fail("/t1", **({"rate": 200_000} if halfway else {"delay": 1.0}))
    job = await field.start("t1", {"*": {"steps": 4}}, count=count)
    if halfway:
        await field.until(job, lambda live: live.bytes_done)
    disk.fill(os.getpid())
    await field.until(job, lambda live: live.retry_at is not None)
    live = field.jobs.live(job)
    assert live is not None
    assert "space" in live.trouble or "free" in live.trouble
    disk.free(os.getpid())
    await field.published(job)
    assert_dataset_is_whole(field, files, job, 1)


@pytest.mark.campaign
async def test_at_whatever_instant_the_disk_is_full_the_dataset_is_whole_in_the_end(
    field: Field, disk: Disk, files: Files
) -> None:
    """Before a dataset comes, while it comes, when it is counted, or after it: for as long as it may be."""
    random = Random(SEED)
    for number in range(INSTANTS):
        files.fail(f"/t{number}", rate=400_000)
        job = await field.start(f"t{number}", {"*": {"steps": 4}}, count=8000)
        await asyncio.sleep(instant := random.uniform(0.0, 2.5))
        disk.fill(os.getpid())
        await asyncio.sleep(random.uniform(0.1, 1.0))
        disk.free(os.getpid())
        row = await field.over(job)
        assert row.state is JobState.DONE, f"full after {instant:.2f} s: {await field.describe(job)}"
        await field.published(job)
        assert_dataset_is_whole(field, files, job, len(await field.attempts(job)))
