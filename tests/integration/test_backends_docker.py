"""Docker's faults and refusals, with a real Docker Engine that these tests may break."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from miner.backends import ownership
from miner.backends.base import AttemptSpec, BackendRejected, BackendUnreachable, EndCause, RunPhase
from miner.backends.docker.images import TrainerImages
from miner.support.data_id import data_id
from tests.doubles import base_image
from tests.doubles.backend_bench import WAIT_S, BackendBench, Run, docker_bench
from tests.doubles.backend_fixtures import own_dockerd
from tests.doubles.dockerd import GPUS, Dockerd
from tests.integration.test_backends import POLITE, SLEEPER, host_pid

pytestmark = pytest.mark.docker

#: Writes a numbered line every 10 ms.
COUNTER = """
import itertools, time
for number in itertools.count():
    print(number, flush=True)
    if number == 5: open('up', 'w').write('1')
    time.sleep(0.01)
"""


@pytest_asyncio.fixture
async def bench(docker_host: Dockerd, tmp_path: Path) -> AsyncIterator[BackendBench]:
    bench = on(docker_host, tmp_path)
    yield bench
    await bench.clear()


@pytest.fixture
def mortal() -> Iterator[Dockerd]:
    """Takes its containers down with it."""
    with own_dockerd() as dockerd:
        yield dockerd


@pytest.fixture
def restorable() -> Iterator[Dockerd]:
    """Leaves its containers running."""
    with own_dockerd(live_restore=True) as dockerd:
        yield dockerd


def on(dockerd: Dockerd, tmp_path: Path, **more: Any) -> BackendBench:
    return docker_bench(tmp_path / "data", dockerd.host, base_image.NAME, **more)


async def submitted_at_last(bench: BackendBench, spec: AttemptSpec) -> Run:
    """Asked again while Docker is in trouble, as the pipeline does."""
    for _ in range(600):
        with suppress(BackendUnreachable):
            return await bench.submit(spec)
        await asyncio.sleep(0.1)
    raise AssertionError(f"{spec.key} could not be submitted")


@pytest.fixture
def api(docker_host: Dockerd) -> Iterator[Any]:
    """Docker's API, as any other program has it."""
    with docker_host.client() as client:
        yield client.api


def containers(dockerd: Dockerd) -> list[dict[str, Any]]:
    with dockerd.client() as client:
        found: list[dict[str, Any]] = client.api.containers(all=True)
        return found


# Docker dies


async def test_a_killed_docker_without_live_restore_ends_the_run_and_says_so(
    mortal: Dockerd, tmp_path: Path
) -> None:
    bench = on(mortal, tmp_path)
    run = await bench.submit(bench.code(POLITE))
    await bench.said(run, "up")
    mortal.kill()
    for ask in (bench.status(run), bench.backend.find(run.spec.key), bench.backend.list_runs()):
        with pytest.raises(BackendUnreachable):
            await ask
    with pytest.raises(BackendUnreachable):
        await bench.submit(bench.code("pass"))
    mortal.start()
    status = await bench.end_of(run)
    # It had the time to save, and still it is known that nobody here ended it.
    assert (status.why, status.code) == (EndCause.KILLED, 0)
    assert run.file("saved") == "all of it"
    await bench.clear()
    assert containers(mortal) == []


async def test_a_killed_docker_with_live_restore_leaves_the_run_alone(
    restorable: Dockerd, tmp_path: Path
) -> None:
    bench = on(restorable, tmp_path)
    run = await bench.submit(bench.code(COUNTER))
    await bench.said(run, "up")
    restorable.kill()
    with pytest.raises(BackendUnreachable):
        await bench.status(run)
    at_death = len(run.log.splitlines())
    async with asyncio.timeout(WAIT_S):
        while len(run.log.splitlines()) <= at_death + 20:
            await asyncio.sleep(0.01)
    restorable.start()
    assert (await bench.status(run)).phase is RunPhase.RUNNING
    assert await bench.again().find(run.spec.key) == run.ref
    await bench.backend.stop(run.ref)
    assert (await bench.end_of(run)).why is EndCause.STOPPED
    lines = run.log.splitlines()
    # Output does not go through Docker, so none was lost or held up.
    assert lines == [str(number) for number in range(len(lines))]
    await bench.clear()


@pytest.mark.parametrize(
    ("text", "more", "why", "code"),
    [
        ("raise SystemExit(5)", {}, EndCause.FAILED, 5),
        ("pass", {}, EndCause.OK, 0),
        ("len(bytes([7]) * (1 << 29))", {"memory_bytes": 64 << 20}, EndCause.OOM_KILLED, 137),
    ],
)
async def test_an_end_while_docker_is_down_is_known_afterwards(
    text: str, more: dict[str, Any], why: EndCause, code: int, restorable: Dockerd, tmp_path: Path
) -> None:
    """Docker itself forgets that memory was the reason."""
    bench = on(restorable, tmp_path)
    waiting = "import os, time; open('up', 'w').write('1')\nwhile not os.path.exists('go'): time.sleep(0.01)"
    run = await bench.submit(bench.code(f"{waiting}\n{text}", **more))
    await bench.said(run, "up")
    restorable.kill()
    (run.dir / "go").touch()
    await bench.said(run, "exit.json")
    restorable.start()
    status = await bench.end_of(run)
    assert (status.why, status.code) == (why, code)
    await bench.clear()


async def test_an_orderly_stop_of_docker_lets_the_trainer_save(mortal: Dockerd, tmp_path: Path) -> None:
    bench = on(mortal, tmp_path)
    run = await bench.submit(bench.code(POLITE))
    await bench.said(run, "up")
    mortal.stop()
    assert run.file("saved") == "all of it"
    mortal.start()
    assert (await bench.end_of(run)).why is EndCause.KILLED
    await bench.clear()


async def test_a_docker_killed_before_any_part_of_a_submit_runs_it_once(
    restorable: Dockerd, tmp_path: Path
) -> None:
    """Before a container is made, between that and its start, and while it runs."""
    bench = on(restorable, tmp_path)
    backend: Any = bench.backend
    for part in ("making", "starting", "ending"):
        spec = bench.code("import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)")
        made = None
        if part == "starting":
            made = (await backend._create(spec, time.monotonic() + 300))["Id"]
        elif part == "ending":
            made = (await bench.submit(spec)).ref
        await asyncio.to_thread(restorable.kill)
        with pytest.raises(BackendUnreachable):
            await bench.backend.submit(spec)
        await asyncio.to_thread(restorable.start)
        run = await submitted_at_last(bench, spec)
        assert made in (None, run.ref)
        assert len(containers(restorable)) == 1
        (run.dir / "go").touch()
        assert (await bench.end_of(run)).why is EndCause.OK
        assert not ownership.marked_processes(ownership.run_mark(data_id(bench.data_dir), spec.key))
        await bench.backend.remove(run.ref)
        assert containers(restorable) == []


async def test_a_docker_that_hangs_is_unreachable_and_not_waited_for(mortal: Dockerd, tmp_path: Path) -> None:
    bench = on(mortal, tmp_path)
    run = await bench.submit(bench.code(SLEEPER))
    bench.backend._client.query_timeout_s = 0.5  # type: ignore[attr-defined]
    mortal.freeze()
    try:
        with pytest.raises(BackendUnreachable):
            await bench.backend.list_runs()
        with pytest.raises(BackendUnreachable):
            await bench.status(run)
    finally:
        mortal.thaw()
    assert (await bench.status(run)).phase is RunPhase.RUNNING
    await bench.clear()


async def test_the_daemon_comes_back_between_making_and_starting(bench: BackendBench) -> None:
    spec = bench.code("open('ran', 'a').write('x')")
    made = await bench.backend._create(spec, time.monotonic() + 120)  # type: ignore[attr-defined]
    # Never started: nobody should wait for it, and nobody make a second one.
    assert await bench.backend.find(spec.key) is None
    assert (await bench.backend.poll(made["Id"], spec.run_dir)).phase is RunPhase.QUEUED
    assert [found.key for found in await bench.backend.list_runs()] == [spec.key]
    run = await bench.submit(spec)
    assert run.ref == made["Id"]
    await bench.end_of(run)
    assert run.file("ran") == "x"


# the container dies


async def test_a_container_killed_or_stopped_from_outside_is_recognized(
    bench: BackendBench, api: Any
) -> None:
    killed, stopped = [await bench.submit(bench.code(SLEEPER)) for _ in range(2)]
    for run in (killed, stopped):
        await bench.said(run, "up")
    api.kill(killed.ref)
    api.stop(stopped.ref)
    assert (await bench.end_of(killed)).why is EndCause.KILLED
    assert (await bench.end_of(stopped)).why is EndCause.KILLED


async def test_a_removed_container_is_lost_unless_its_end_was_recorded(bench: BackendBench, api: Any) -> None:
    gone = await bench.submit(bench.code(SLEEPER))
    await bench.said(gone, "up")
    api.remove_container(gone.ref, force=True)
    assert (await bench.status(gone)).phase is RunPhase.LOST
    assert await bench.backend.find(gone.spec.key) is None
    gone.ref = ""


# refusals


@pytest.mark.parametrize(
    ("image", "ulimits", "spec", "way_out"),
    [
        # It is not fetched either.
        ("registry.invalid/never/was:1", "core=0", {}, "god-miner images build"),
        (base_image.NAME, "nofile=100000000000", {}, "TRAINER_ULIMITS"),
        (base_image.NAME, "core=0", {"gpus": ("GPU-00000000-dead-4000-8000-000000000000",)}, "nvidia-smi -L"),
        (base_image.NAME, "core=0", {"cpus": "900-901"}, "docker info"),
    ],
    ids=["image", "ulimit", "GPU", "cores"],
)
async def test_what_docker_cannot_start_is_rejected_with_a_way_out_and_nothing_is_left(
    image: str, ulimits: str, spec: dict[str, Any], way_out: str, docker_host: Dockerd, tmp_path: Path
) -> None:
    bench = docker_bench(tmp_path / "data", docker_host.host, image, trainer_ulimits=ulimits)
    with pytest.raises(BackendRejected, match=way_out):
        await bench.submit(bench.code("pass", **spec))
    assert await bench.backend.list_runs() == []
    await bench.clear()


async def test_a_name_taken_by_a_stranger_is_rejected(bench: BackendBench, api: Any) -> None:
    spec = bench.code("pass")
    api.create_container(base_image.NAME, ["true"], name=spec.key)
    try:
        with pytest.raises(BackendRejected, match="not ours"):
            await bench.submit(spec)
        assert await bench.backend.find(spec.key) is None
        assert await bench.backend.list_runs() == []
    finally:
        api.remove_container(spec.key)


async def test_another_data_folder_s_runs_are_not_ours(
    bench: BackendBench, docker_host: Dockerd, tmp_path: Path
) -> None:
    other = docker_bench(tmp_path / "other", docker_host.host, base_image.NAME)
    run = await other.submit(other.code(SLEEPER))
    assert await bench.backend.list_runs() == []
    assert await bench.backend.find(run.spec.key) is None
    assert len(await other.backend.list_runs()) == 1
    await other.clear()


async def test_the_gpu_hook_gets_the_requested_gpus_and_never_all(
    bench: BackendBench, docker_host: Dockerd
) -> None:
    """The image says NVIDIA_VISIBLE_DEVICES=all, as those made for GPUs do."""
    for gpus, asked in (((GPUS[2], GPUS[0]), f"{GPUS[2]},{GPUS[0]}"), ((), None), (("cpu",), None)):
        before = len(docker_host.gpu_requests())
        run, _ = await bench.play("pass", gpus=gpus)
        seen = [one["devices"] for one in docker_host.gpu_requests()[before:] if one["id"] == run.ref]
        assert [one for one in seen if one != "void"] == ([asked] if asked else [])


async def test_an_image_without_python_is_reported(docker_host: Dockerd, api: Any, tmp_path: Path) -> None:
    empty = tmp_path / "empty.tar"
    empty.write_bytes(b"\0" * 10240)
    api.import_image_from_file(str(empty), repository="ci-empty", tag="1", changes=["ENV PATH=/bin"])
    without = docker_bench(tmp_path / "other", docker_host.host, "ci-empty:1")
    _, status = await without.play("pass")
    assert status.why is EndCause.FAILED
    assert "python3" in status.detail
    await without.clear()


# what it is given


async def test_what_docker_shows_of_a_run_is_locked_down_and_without_secrets(
    docker_host: Dockerd, api: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_environment_of_the_daemon")
    bench = on(docker_host, tmp_path, wallet_password="opens the hotkey", operator_token="0123456789abcdef")
    run = await bench.submit(bench.code(SLEEPER, memory_bytes=256 << 20, shm_bytes=32 << 20, gpus=("1",)))
    found = api.inspect_container(run.ref)
    text = json.dumps(found)
    for secret in ("hf_environment_of_the_daemon", "opens the hotkey", "0123456789abcdef"):
        assert secret not in text
    host = found["HostConfig"]
    assert host["NetworkMode"] == "none"
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert host["ReadonlyRootfs"] is True
    assert host["Init"] is True
    assert (host["Memory"], host["MemorySwap"], host["ShmSize"]) == (256 << 20, 256 << 20, 32 << 20)
    assert host["PidsLimit"] == bench.processes
    assert host["RestartPolicy"]["Name"] == "no"
    assert not host["AutoRemove"]
    assert [one["DeviceIDs"] for one in host["DeviceRequests"]] == [["1"]]
    assert found["Config"]["User"] == "10002:10002"
    assert found["Config"]["Labels"]["god-miner.job"] == run.spec.labels["job"]
    assert (run.dir.stat().st_uid, run.dir.stat().st_gid) == (10002, 10002)


async def test_a_pinned_image_runs_although_its_name_was_moved(bench: BackendBench, api: Any) -> None:
    image_id = api.inspect_image(base_image.NAME)["Id"]
    TrainerImages(bench.settings).set_pin("text", image_id, "source")
    empty = bench.data_dir / "empty.tar"
    empty.write_bytes(b"\0" * 10240)
    repository, _, tag = base_image.NAME.partition(":")
    api.import_image_from_file(str(empty), repository=repository, tag=tag)
    try:
        assert api.inspect_image(base_image.NAME)["Id"] != image_id
        _, status = await bench.play("pass")
        assert status.why is EndCause.OK
    finally:
        api.tag(image_id, repository, tag, force=True)


async def test_stopping_what_is_hung_in_the_wrapper_works_from_outside(bench: BackendBench) -> None:
    run = await bench.submit(bench.code(SLEEPER))
    await bench.said(run, "up")
    os.kill(host_pid(run, "wrapper"), signal.SIGSTOP)
    await bench.backend.stop(run.ref, force=True)
    assert (await bench.end_of(run)).why is EndCause.STOPPED
