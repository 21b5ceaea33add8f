"""The disk is full while something comes or is saved: said so, nothing corrupt, over when it is over."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from core.domain.job_states import EndReason
from tests.doubles.required import missing
from tests.integration.disks import Disk, small_disk
from tests.integration.jobs.field import Field, Files, process_field


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
