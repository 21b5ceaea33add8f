"""A job's inputs from end to end: real processes, the real client of the hub, every fault on the way."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.domain.job_states import EndReason, StepFailed
from core.domain.records import Confidence
from core.domain.tasks import FileFormat, ImageModelType, InstructDataset, TaskType
from core.models.facts import Family
from miner.inputs import fetch, worker
from miner.inputs.fetch import FetchedInputs, InputsProvider, InputWorkers, JobInputs, JobTask
from miner.inputs.messages import MeasureOrder, RetryLimits
from miner.settings import load_settings
from tests.core.data.picture_files import png, zip_bytes
from tests.doubles.family import children
from tests.doubles.files import SIGNATURE, FileStore
from tests.doubles.hub import Hub
from tests.doubles.own_child import answered_by
from tests.miner.inputs.models import WEIGHTS, model_files

pytestmark = pytest.mark.process


DATASET = InstructDataset(field_instruction="q", field_output="a")
DATA = json.dumps([{"q": "word " * (n % 7 + 1), "a": "three little words"} for n in range(2000)]).encode()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        hub.add("owner/model", model_files())
        yield hub


@pytest.fixture
def inputs(hub: Hub, tmp_path: Path) -> JobInputs:
    return made(hub, tmp_path)


def made(hub: Hub, tmp_path: Path, **settings: str) -> JobInputs:
    env = {
        "DATA_DIR": str(tmp_path / "data"),
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": hub.token,
        "MIN_FREE_DISK_BYTES": "0",
        "ALLOW_PRIVATE_NETWORKS": "127.0.0.0/8",
        **settings,
    }
    patience = RetryLimits(tries=3, first_pause=0.01, timeout=60.0)
    return JobInputs(load_settings(env=env, env_file=None), patience=patience)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without children: what they are for is tried by the tests that have them."""
    monkeypatch.setattr(fetch, "run_order", answered_by(worker))


@pytest.fixture
def job_task(store: FileStore, tmp_path: Path) -> JobTask:
    return JobTask(
        job_id=1,
        task_type=TaskType.INSTRUCT,
        model="owner/model",
        data=store.add("0123_train_data.json", DATA),
        file_format=FileFormat.S3,
        folder=tmp_path / "data/jobs/1/inputs",
        dataset=DATASET,
    )


def silent(_what: str, _did: int, _of: int | None) -> None:
    pass


async def failure(inputs: InputsProvider, job_task: JobTask) -> StepFailed:
    with pytest.raises(StepFailed) as caught:
        await inputs.fetch(job_task, silent)
    assert SIGNATURE not in str(caught.value)
    return caught.value


def check(fetched: FetchedInputs) -> None:
    assert fetched.data_path.read_bytes() == DATA
    assert (fetched.model_path / "model.safetensors").read_bytes() == WEIGHTS
    assert fetched.model.family is Family.LLAMA
    assert (fetched.data.rows, fetched.data.prompt.max, fetched.data.answer.percentile(50)) == (2000, 7, 3)
    assert fetched.data.lengths_confidence is Confidence.CONFIG


async def test_everything_is_fetched_checked_and_measured_and_progress_is_reported(
    inputs: JobInputs, job_task: JobTask, hub: Hub, store: FileStore
) -> None:
    reported: list[tuple[str, int, int | None]] = []
    check(await inputs.fetch(job_task, lambda *did: reported.append(did)))
    assert {what for what, _, _ in reported} == {"dataset", "check", "model"}
    check(await inputs.fetch(job_task, silent))
    assert len(store.requests) == 1
    assert len(hub.lines("GET /store")) == 1
    assert inputs.cache.leases.by_model() == {"owner/model": [1]}


@pytest.mark.usefixtures("here")
async def test_pictures_come_as_a_zip(
    inputs: JobInputs, job_task: JobTask, hub: Hub, store: FileStore
) -> None:
    hub.add("owner/sdxl", {"sdxl.safetensors": WEIGHTS})
    zipped = zip_bytes({"train_data/0.png": png(), "train_data/0.txt": b"a cat"})
    found = await inputs.fetch(
        replace(
            job_task,
            task_type=TaskType.IMAGE,
            model="owner/sdxl",
            data=store.add("x.zip", zipped),
            dataset=None,
            image_type=ImageModelType.SDXL,
        ),
        silent,
    )
    assert found.model_path.name == "sdxl.safetensors"
    assert found.data_path.read_bytes() == zipped
    assert found.data.rows == 1


@pytest.mark.usefixtures("here")
async def test_an_operators_own_files_need_no_network(
    inputs: JobInputs, job_task: JobTask, hub: Hub, store: FileStore, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    for name, content in model_files().items():
        assert isinstance(content, bytes)
        (tmp_path / "mine" / name).write_bytes(content)
    (tmp_path / "mine.json").write_bytes(DATA)
    own = replace(job_task, data=tmp_path / "mine.json", model_folder=tmp_path / "mine")
    found = await inputs.fetch(own, silent)
    check(found)
    assert found.model_path == tmp_path / "mine"
    inputs.hold(own)
    assert inputs.cache.leases.by_model() == {}
    assert hub.requests == store.requests == []


LIMITED = {"status": 429, "headers": {"Retry-After": "120"}}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("where", "fault", "reason"),
    [
        ("store", {"corrupt_at": 0}, EndReason.BAD_DATA),
        ("hub", LIMITED, EndReason.RATE_LIMITED),
    ],
    ids=["dataset damaged", "hub 429"],
)
async def test_lasting_trouble_has_a_clear_end_and_no_half_file_is_trusted(
    inputs: JobInputs,
    job_task: JobTask,
    hub: Hub,
    store: FileStore,
    where: str,
    fault: dict[str, Any],
    reason: EndReason,
) -> None:
    (hub if where == "hub" else store).fail(times=None, **fault)
    failed = await failure(inputs, job_task)
    assert failed.reason is reason
    assert failed.retry_after == (120.0 if reason is EndReason.RATE_LIMITED else None)
    if where == "hub":
        assert inputs.cache.snapshots() == []
    else:
        assert not (job_task.folder / "data.json").exists()
    hub.faults.clear()
    store.faults.clear()
    check(await inputs.fetch(job_task, silent))


async def test_a_failure_for_good_ends_the_other_side_and_one_that_may_pass_does_not(
    inputs: JobInputs, job_task: JobTask, hub: Hub, store: FileStore
) -> None:
    hub.fail("GET /store", cut_after=1000, how="hang", times=None)
    bad = replace(job_task, data=store.add("bad", b"[]"))
    assert (await failure(inputs, bad)).reason is EndReason.BAD_DATA
    assert inputs.cache.snapshots() == []
    hub.faults.clear()
    hub.fail("GET /store", rate=100_000.0)
    store.fail(status=500, times=3)
    assert (await failure(inputs, job_task)).reason is EndReason.NETWORK
    assert [cached.model for cached in inputs.cache.snapshots()] == ["owner/model"]
    hub.fail(status=404)
    store.fail(status=500, times=3)
    assert (await failure(inputs, replace(job_task, model="owner/none"))).reason is EndReason.MODEL_MISSING


async def test_a_cancelled_fetch_leaves_no_process_and_is_resumed(
    inputs: JobInputs, job_task: JobTask, hub: Hub, store: FileStore
) -> None:
    hub.fail("GET /store", cut_after=60_000, how="hang")
    store.fail(cut_after=30_000, how="hang")
    others = children()
    under_way = asyncio.Event()

    def reported(what: str, did: int, _of: int | None) -> None:
        if what == "model" and did >= 60_000:
            under_way.set()

    task = asyncio.create_task(inputs.fetch(job_task, reported))
    await asyncio.wait_for(under_way.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert children() <= others
    assert not (job_task.folder / "data.json").exists()
    assert inputs.cache.snapshots() == []
    check(await inputs.fetch(job_task, silent))


@pytest.mark.usefixtures("here")
async def test_several_jobs_at_once_have_one_model_and_a_folder_each(
    inputs: JobInputs, job_task: JobTask, hub: Hub, tmp_path: Path
) -> None:
    jobs = [replace(job_task, job_id=n, folder=tmp_path / f"jobs/{n}/inputs") for n in range(1, 4)]
    fetched = await asyncio.gather(*(inputs.fetch(job, silent) for job in jobs))
    assert len({each.model_path for each in fetched}) == 1
    assert len({each.data_path for each in fetched}) == 3
    assert len(hub.lines("GET /store")) == 1
    assert inputs.cache.leases.by_model() == {"owner/model": [1, 2, 3]}


@pytest.mark.usefixtures("here")
async def test_leases_keep_a_model_until_the_job_lets_go_also_after_a_restart(
    inputs: JobInputs, job_task: JobTask, hub: Hub, tmp_path: Path
) -> None:
    await inputs.fetch(job_task, silent)
    again = made(hub, tmp_path)
    assert again.cache.prune() == []
    again.hold(replace(job_task, job_id=2))
    again.release(1)
    again.release(1)
    assert again.cache.prune() == []
    again.release_all_but({7})
    assert [cached.model for cached in again.cache.prune()] == ["owner/model"]


@pytest.mark.thorough
async def test_too_long_a_download_is_ended_and_goes_on_later(
    hub: Hub, job_task: JobTask, store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.fail(rate=40_000.0, times=None)
    monkeypatch.setattr("miner.inputs.fetch.DATASET_SECONDS", 0.5)
    failed = await failure(made(hub, tmp_path), job_task)
    assert (failed.reason, "too slow" in str(failed)) == (EndReason.NETWORK, True)
    store.faults.clear()
    check(await made(hub, tmp_path).fetch(job_task, silent))
    assert store.requests[-1].headers.get("range")


@pytest.mark.usefixtures("here")
async def test_without_a_tokenizer_of_its_own_kind_lengths_are_by_bytes(
    inputs: JobInputs, job_task: JobTask, hub: Hub
) -> None:
    hub.add("owner/odd", model_files(**{"tokenizer.json": b"{}"}))
    found = await inputs.fetch(replace(job_task, model="owner/odd"), silent)
    assert found.data.lengths_confidence is Confidence.NAME


async def test_no_secret_gets_into_files_logs_or_arguments(
    inputs: JobInputs,
    job_task: JobTask,
    hub: Hub,
    store: FileStore,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    secrets = (SIGNATURE.encode(), hub.token.encode())
    seen: list[bytes] = []

    others = children()

    def look(_what: str, _did: int, _of: int | None) -> None:
        for pid in children() - others:
            for name in ("cmdline", "environ"):
                with suppress(OSError):  # it has ended
                    seen.append(Path(f"/proc/{pid}/{name}").read_bytes())

    hub.fail("GET /store", cut_after=90_000, how="reset")
    hub.fail("GET /store", status=500)
    store.fail(status=500)
    check(await inputs.fetch(job_task, look))
    store.fail(status=403, times=None)
    await failure(inputs, replace(job_task, folder=tmp_path / "data/jobs/2/inputs"))
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert seen
    for text in (*files, *seen, caplog.text.encode()):
        assert not any(secret in text for secret in secrets)


#: Says nothing, ever.
DEAF = (sys.executable, "-S", "-c", "import time; time.sleep(60)")
#: Ends at once, without an answer.
SHORT = (sys.executable, "-S", "-c", "")


def order(folder: Path) -> MeasureOrder:
    dataset = InstructDataset(field_instruction="q", field_output="a")
    return MeasureOrder(folder=folder, tokenizer=folder / "tokenizer.json", dataset=dataset)


async def test_of_many_jobs_a_few_have_processes_and_the_next_one_comes_when_one_ends(tmp_path: Path) -> None:
    workers = InputWorkers(tmp_path, command=DEAF)
    others = children()
    runs = [
        asyncio.create_task(workers.run(job, order(tmp_path), silent))
        for job in range(3 * fetch.WORKERS_AT_ONCE)
    ]

    async def processes(wanted: int) -> set[int]:
        async with asyncio.timeout(120):
            while len(found := children() - others) != wanted:
                await asyncio.sleep(0.02)
        return found

    try:
        before = await processes(fetch.WORKERS_AT_ONCE)
        runs[0].cancel()
        async with asyncio.timeout(120):
            while (after := await processes(fetch.WORKERS_AT_ONCE)) == before:
                await asyncio.sleep(0.02)
        assert len(after & before) == fetch.WORKERS_AT_ONCE - 1
    finally:
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
    assert children() <= others


async def test_the_wait_for_a_turn_does_not_count_against_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "WORKERS_AT_ONCE", 1)
    workers = InputWorkers(tmp_path, command=DEAF)
    first = asyncio.create_task(workers.run(1, order(tmp_path), silent))
    second = asyncio.create_task(workers.run(2, order(tmp_path), silent, 0.1))
    await asyncio.sleep(1)
    assert not second.done()
    first.cancel()
    with pytest.raises(StepFailed, match=r"did not come within 0\.1 s") as caught:
        await second
    assert caught.value.reason is EndReason.NETWORK


async def test_a_worker_without_an_answer_is_a_bug_and_frees_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "WORKERS_AT_ONCE", 1)
    workers = InputWorkers(tmp_path, command=SHORT)
    for _ in range(3):
        with pytest.raises(StepFailed, match="no answer") as caught:
            await workers.run(1, order(tmp_path), silent, 30)
        assert caught.value.reason is EndReason.BUG
