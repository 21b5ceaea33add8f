"""Inputs under kills and on disks that fill up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from core.domain.job_states import EndReason, StepFailed
from core.domain.tasks import FileFormat, InstructDataset, TaskType
from miner.inputs.fetch import FetchedInputs, JobInputs, JobTask
from miner.inputs.messages import RetryLimits
from miner.settings import load_settings
from tests.doubles.family import children
from tests.doubles.files import FileStore
from tests.doubles.hub import Hub
from tests.integration.disks import small_disk
from tests.miner.inputs.models import sharded

DATASET = InstructDataset(field_instruction="q", field_output="a")
DATA = json.dumps([{"q": "word " * 20, "a": "three little words"} for _ in range(12_000)]).encode()
MODEL = sharded(3, 6000)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        hub.add("owner/model", MODEL)
        yield hub


@pytest.fixture
def store() -> Iterator[FileStore]:
    with FileStore() as store:
        yield store


def inputs_in(folder: Path, hub: Hub) -> JobInputs:
    env = {
        "DATA_DIR": str(folder),
        "HF_ENDPOINT": hub.url,
        "MIN_FREE_DISK_BYTES": "0",
        "ALLOW_PRIVATE_NETWORKS": "127.0.0.0/8",
    }
    settings = load_settings(env=env, env_file=None)
    return JobInputs(settings, patience=RetryLimits(tries=2, first_pause=0.01, timeout=60.0))


def wanted_in(folder: Path, store: FileStore, data: bytes = DATA) -> JobTask:
    return JobTask(
        job_id=1,
        task_type=TaskType.INSTRUCT,
        model="owner/model",
        data=store.add("a", data),
        file_format=FileFormat.S3,
        folder=folder / "jobs/1/inputs",
        dataset=DATASET,
    )


def silent(_what: str, _did: int, _of: int | None) -> None:
    pass


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check(fetched: FetchedInputs) -> None:
    assert fetched.data_path.read_bytes() == DATA
    assert fetched.data.rows == 12_000
    assert contents(fetched.model_path) == MODEL


def kill_workers(others: set[int]) -> None:
    """All children but these; one may just have ended."""
    for pid in children() - others:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def test_workers_killed_wherever_they_are_leave_nothing_that_is_trusted(
    hub: Hub, store: FileStore, tmp_path: Path
) -> None:
    """Both sides hang until the workers are dead: at the first byte, within a dataset, within a model."""
    inputs, wanted = inputs_in(tmp_path, hub), wanted_in(tmp_path, store)
    for of_dataset, match, skip, of_model in (
        (0, "GET /api", 0, 0),
        (300_000, "GET /store", 0, 0),
        (0, "GET /store", 0, 1000),
        (0, "GET /store", 1, 1000),
    ):
        for server in (hub, store):
            server.faults.clear()
            server.requests.clear()
        store.fail(cut_after=of_dataset, how="hang", times=None)
        hub.fail(match, skip=skip, cut_after=of_model, how="hang", times=None)
        others = children()
        task = asyncio.create_task(inputs.fetch(wanted, silent))
        while not store.requests or len(hub.lines(match)) <= skip:
            assert not task.done(), "it never came to the gate"
            await asyncio.sleep(0.02)
        kill_workers(others)
        with pytest.raises(StepFailed):
            await task
        assert not (wanted.folder / "data.json").exists()
        assert inputs.cache.snapshots() == []
    hub.faults.clear()
    store.faults.clear()
    check(await inputs.fetch(wanted, silent))


async def test_a_worker_that_was_killed_is_tried_again(hub: Hub, store: FileStore, tmp_path: Path) -> None:
    store.fail(cut_after=1000, how="hang")
    others = children()
    task = asyncio.create_task(inputs_in(tmp_path, hub).fetch(wanted_in(tmp_path, store), silent))
    while not store.requests:
        await asyncio.sleep(0.02)
    kill_workers(others)
    with pytest.raises(StepFailed) as caught:
        await task
    assert caught.value.reason is EndReason.NETWORK
    assert "status -9" in str(caught.value)


class Disk:
    """Where little fits, until there is room."""

    def __init__(self, folder: Path, free: Callable[[], None]) -> None:
        self.folder = folder
        self.free = free


@contextmanager
def limited(folder: Path, size: int) -> Iterator[Disk]:
    """Files that may not grow, for every process that is started meanwhile: every machine has that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder.mkdir()

    def free() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield Disk(folder, free)
    finally:
        free()


@pytest.fixture(params=["limited", "mounted"])
async def disk(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Disk]:
    if request.param == "limited":
        with limited(tmp_path / "disk", 600_000) as small:
            yield small
        return
    with small_disk(tmp_path / "disk", megabytes=8) as mounted:
        if mounted is None:
            pytest.skip("no file system can be mounted here; the limit on file sizes has been tried instead")
        filler = tmp_path / "disk/filler"
        filler.write_bytes(b"x" * 7_500_000)
        yield Disk(tmp_path / "disk", filler.unlink)


@pytest.mark.parametrize("told_before", [True, False])
async def test_a_disk_that_fills_up_under_a_dataset_is_reported_and_it_goes_on_when_there_is_room(
    hub: Hub, store: FileStore, disk: Disk, told_before: bool
) -> None:
    """With its length the server tells before that there is no room; without, it is found while writing."""
    hub.add("owner/model", {name: data for name, data in MODEL.items() if "0000" not in name})
    inputs, wanted = inputs_in(disk.folder, hub), wanted_in(disk.folder, store)
    if not told_before:
        store.fail(no_length=True, times=1)
    with pytest.raises(StepFailed) as caught:
        await inputs._dataset(wanted, silent)
    assert caught.value.reason is EndReason.DISK_FULL
    assert not (wanted.folder / "data.json").exists()
    disk.free()
    done = await inputs._dataset(wanted, silent)
    assert done.path.read_bytes() == DATA
    assert done.facts.rows == 12_000


async def test_a_disk_that_fills_up_under_a_model_is_reported_and_it_goes_on_when_there_is_room(
    hub: Hub, store: FileStore, disk: Disk
) -> None:
    inputs = inputs_in(disk.folder, hub)
    with pytest.raises(StepFailed) as caught:
        await inputs.fetch_model("owner/model", None, silent)
    assert caught.value.reason is EndReason.DISK_FULL
    assert inputs.cache.snapshots() == []
    disk.free()
    done = await inputs.fetch_model("owner/model", None, silent)
    assert contents(done.path) == MODEL
