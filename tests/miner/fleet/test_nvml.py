"""Scans through the worker process, against an NVML library that fails on demand."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from core.domain.hardware import GpuLink
from miner.fleet.nvml import NvmlSource
from miner.fleet.nvml_worker import near_cores
from miner.fleet.sources import GpuScan, NoNvidiaDriver, ScanFailed
from tests.doubles.nvml import DRIVER_NOT_LOADED, LOST, UNKNOWN, NvmlHost, uuid

pytestmark = pytest.mark.process


Host = Callable[..., NvmlHost]


@asynccontextmanager
async def source(**more: Any) -> AsyncIterator[NvmlSource]:
    nvml = NvmlSource(**more)
    try:
        yield nvml
    finally:
        await nvml.close()


async def one_look(**more: Any) -> GpuScan:
    async with source(**more) as nvml:
        return await nvml.scan()


async def test_every_gpu_is_scanned_and_those_on_a_switch_are_all_linked(nvml_host: Host) -> None:
    nvml_host(4)
    scan = await one_look()
    ids = [uuid(index) for index in range(4)]
    assert [(gpu.index, gpu.id) for gpu in scan.gpus] == list(enumerate(ids))
    assert all(gpu.linked == {*ids} - {gpu.id} for gpu in scan.gpus)
    first = scan.gpus[0]
    assert (first.kind.name, first.kind.link, first.kind.compute_capability) == (
        "H100-SXM",
        GpuLink.NVLINK,
        (9, 0),
    )
    assert (first.total_bytes, first.used_bytes, first.processes) == (81559 * 2**20, 4 * 2**20, 0)
    assert (scan.source, scan.errors) == ("driver 550.127.05", {})


async def test_bridged_gpus_are_linked_in_pairs(nvml_host: Host) -> None:
    host = nvml_host(4)
    host.set(topology="pairs")
    for index in range(4):
        host.gpu(index, name="NVIDIA H100 PCIe")
    scan = await one_look()
    assert [gpu.linked for gpu in scan.gpus] == [{uuid(1)}, {uuid(0)}, {uuid(3)}, {uuid(2)}]
    assert scan.gpus[0].kind.link is GpuLink.NVLINK_PAIR


async def test_gpus_without_links_are_on_pcie(nvml_host: Host) -> None:
    nvml_host(2).set(topology="none")
    scan = await one_look()
    assert [gpu.linked for gpu in scan.gpus] == [frozenset(), frozenset()]
    assert scan.gpus[0].kind.link is GpuLink.PCIE


async def test_an_older_driver_is_read_through_its_older_call(nvml_host: Host) -> None:
    nvml_host(1).gpu(0, is_old=1, used_mib=600)
    (gpu,) = (await one_look()).gpus
    assert gpu.used_bytes == 600 * 2**20


async def test_a_lost_gpu_is_reported_by_index_and_the_others_are_scanned(nvml_host: Host) -> None:
    nvml_host(4).gpu(2, error=LOST)
    scan = await one_look()
    assert [gpu.index for gpu in scan.gpus] == [0, 1, 3]
    assert scan.errors[2].startswith("NVML says: ")
    assert "lost" in scan.errors[2].lower()


async def test_each_scan_has_the_current_state(nvml_host: Host) -> None:
    host = nvml_host(2)
    async with source() as nvml:
        assert len((await nvml.scan()).gpus) == 2
        host.gpu(1, used_mib=70000, processes=2)
        busy = (await nvml.scan()).gpus[1]
        assert (busy.used_bytes, busy.processes) == (70000 * 2**20, 2)
        host.gpu(0, error=UNKNOWN)
        assert 0 in (await nvml.scan()).errors
        host.gpu(0, error=0)
        assert (await nvml.scan()).errors == {}
        host.set(count=1)
        assert len((await nvml.scan()).gpus) == 1


async def test_mig_slices_are_gpus_of_their_own(nvml_host: Host) -> None:
    nvml_host(2).gpu(0, slices=2)
    scan = await one_look()
    assert [gpu.id[:3] for gpu in scan.gpus] == ["MIG", "MIG", "GPU"]
    assert [gpu.index for gpu in scan.gpus] == [0, 1, 2]
    assert scan.gpus[0].kind.name.endswith("SLICE")
    assert scan.gpus[0].linked == frozenset()


@pytest.mark.parametrize(
    ("bus", "cores"), [("00000000:18:00.0", "0-31,64-95"), ("00010000:AF:00.0", "32-63"), ("other", "")]
)
def test_the_cores_near_to_a_gpu_are_those_that_the_kernel_lists(
    tmp_path: Path, bus: str, cores: str
) -> None:
    for name, listed in (("0000:18:00.0", "0-31,64-95"), ("10000:af:00.0", "32-63")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "local_cpulist").write_text(f"{listed}\n")
    assert near_cores(bus, tmp_path) == cores
    assert near_cores("00000000:99:00.0", tmp_path) == ""


async def test_a_gpu_with_mig_and_without_slices_is_an_error(nvml_host: Host) -> None:
    nvml_host(2).gpu(1, slices=0)
    scan = await one_look()
    assert ([gpu.index for gpu in scan.gpus], list(scan.errors)) == ([0], [1])


async def test_a_host_without_a_driver_is_recognized(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with pytest.raises(NoNvidiaDriver):
        await one_look()


async def test_a_driver_that_does_not_run_is_a_failed_scan(nvml_host: Host) -> None:
    nvml_host(4).set(init_error=DRIVER_NOT_LOADED)
    with pytest.raises(ScanFailed, match="NVML says") as raised:
        await one_look()
    assert not isinstance(raised.value, NoNvidiaDriver)


async def test_a_hanging_driver_is_abandoned_and_queried_again(nvml_host: Host) -> None:
    host = nvml_host(2)
    async with source(timeout=120.0, start_timeout=120.0) as nvml:
        await nvml.scan()
        host.gpu(0, delay_ms=60_000)
        nvml._timeout = 0.3
        with pytest.raises(ScanFailed, match=r"did not answer within 0\.3 s"):
            await nvml.scan()
        host.gpu(0, delay_ms=0)
        nvml._timeout = 120.0
        assert len((await nvml.scan()).gpus) == 2


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise SystemExit(3)", "ended with status 3"),
        ("print('hello', flush=True); input(); input()", "cannot be used"),
        ("print('{\"gpus\": 7}', flush=True); input(); input()", "cannot be used"),
        ("print('x' * 3_000_000, flush=True); input(); input()", "cannot be used"),
    ],
)
async def test_an_invalid_answer_of_the_worker_is_a_failed_scan(program: str, message: str) -> None:
    with pytest.raises(ScanFailed, match=message):
        await one_look(worker=(sys.executable, "-c", program))


async def test_a_worker_that_cannot_be_started_is_a_failed_scan() -> None:
    with pytest.raises(ScanFailed, match="cannot be used"):
        await one_look(worker=("/nonexistent/python",))


async def test_the_worker_gets_nothing_of_the_environment_that_is_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    monkeypatch.setenv("WALLET_PASSWORD", "of the operator")
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "all")
    program = f"import os, pathlib; pathlib.Path({str(seen)!r}).write_text(repr(dict(os.environ)))"
    with pytest.raises(ScanFailed):
        await one_look(worker=(sys.executable, "-c", program))
    text = seen.read_text()
    assert "of the operator" not in text
    assert "NVIDIA_VISIBLE_DEVICES" in text


async def test_processes_that_no_signal_ends_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a hanging driver, where a killed process goes on hanging."""
    hanging: list[asyncio.subprocess.Process] = []
    monkeypatch.setattr(asyncio.subprocess.Process, "kill", lambda process: hanging.append(process))
    nvml = NvmlSource(start_timeout=0.2, worker=(sys.executable, "-c", "import time; time.sleep(60)"))
    problem = ""
    while "cannot be ended" not in problem:  # a process that is not there in time does not hang
        with pytest.raises(ScanFailed) as failed:
            await nvml.scan()
        problem = str(failed.value)
    assert len(hanging) == 3
    monkeypatch.undo()
    for process in hanging:
        process.kill()
    await nvml.close()
    with pytest.raises(ScanFailed, match="did not answer"):
        await nvml.scan()
    await nvml.close()


def test_a_worker_whose_daemon_was_killed_ends_without_a_word(nvml_host: Host) -> None:
    """Its errors go where the daemon's JSON lines are."""
    nvml_host(1)
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "miner.fleet.nvml_worker"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as worker:
        worker.stdout.close()
        worker.stdin.write(b"scan\n")
        worker.stdin.flush()
        assert (worker.wait(60), worker.stderr.read()) == (0, b"")
