"""Measurements through the worker process, against an NVML library that plays what the test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from miner.api.samples import GpuSample
from miner.backends.build_fleet import scan_and_sample_once
from miner.fleet.nvml import NvmlSource
from miner.fleet.sources import NoNvidiaDriver, ScanFailed
from miner.settings import load_settings
from tests.doubles.nvml import (
    BEFORE_HOPPER,
    CONSUMER,
    HARDWARE,
    HEAT,
    LOST,
    POWER_CAP,
    NvmlHost,
    heating,
    idling,
    training,
    uuid,
)

pytestmark = pytest.mark.process


Host = Callable[..., NvmlHost]
MIB = 1 << 20


@asynccontextmanager
async def source(**more: Any) -> AsyncIterator[NvmlSource]:
    nvml = NvmlSource(**{"sample_timeout": 120.0, "timeout": 120.0, "start_timeout": 120.0} | more)
    try:
        yield nvml
    finally:
        await nvml.close()


async def measured(nvml: NvmlSource) -> dict[int, GpuSample]:
    return {gpu.index: gpu.sample for gpu in await nvml.sample()}


async def test_a_gpu_that_trains_is_measured_and_activity_from_the_second_sample_on(nvml_host: Host) -> None:
    host = nvml_host(2)
    host.gpu(0, **training())
    async with source() as nvml:
        first = (await measured(nvml))[0]
        assert (first.gpu, first.utilization, first.tensor) == (uuid(0), 0.97, None)
        sample = (await measured(nvml))[0]
    assert (sample.memory_used, sample.memory_total) == (60_000 * MIB, 81559 * MIB)
    assert sample.memory_share == pytest.approx(60_000 / 81559)
    assert (sample.temperature, sample.power_watts, sample.power_limit_watts) == (62, 640.0, 700.0)
    assert (sample.sm_clock_mhz, sample.max_sm_clock_mhz, sample.throttle) == (1755, 1980, ())
    assert (sample.tensor, sample.dram) == (0.41, 0.55)
    assert (sample.pcie_bytes_s, sample.nvlink_bytes_s) == (2400 * MIB, 60_000 * MIB)
    assert (sample.ecc_errors, sample.xids) == (0, ())


async def test_a_script_is_followed_sample_by_sample(nvml_host: Host) -> None:
    host = nvml_host(1)
    async with source() as nvml:
        seen = [(await measured(nvml))[0] for _ in host.play(0, [*heating(), idling()])]
    assert [sample.temperature for sample in seen] == [60, 68, 76, 84, 92, 31]
    assert [sample.throttle for sample in seen] == [(), (), (), (), ("heat",), ()]
    assert (seen[-1].utilization, seen[-1].memory_used) == (0.0, 4 * MIB)


async def test_reasons_of_low_clocks_are_heat_power_and_hardware(nvml_host: Host) -> None:
    host = nvml_host(1)
    async with source() as nvml:
        for bits, words in (
            (POWER_CAP, ("power",)),
            (HARDWARE | HEAT | POWER_CAP, ("hardware", "heat", "power")),
        ):
            host.gpu(0, throttle=bits)
            assert tuple(sorted((await measured(nvml))[0].throttle or ())) == words


async def test_what_a_gpu_or_its_driver_lacks_is_unknown_and_never_zero(nvml_host: Host) -> None:
    nvml_host(1).gpu(0, **training(), lacks=CONSUMER)
    async with source() as nvml:
        await nvml.sample()
        sample = (await measured(nvml))[0]
    unknown = ("tensor", "dram", "pcie_bytes_s", "nvlink_bytes_s", "ecc_errors", "power_limit_watts")
    assert [getattr(sample, name) for name in unknown] == [None] * len(unknown)
    assert (sample.utilization, sample.power_watts) == (0.97, 640.0)


async def test_without_gpm_traffic_comes_from_counters_and_pcie_at_last_from_a_short_look(
    nvml_host: Host,
) -> None:
    host = nvml_host(2)
    host.gpu(0, lacks=BEFORE_HOPPER, pcie_counter=1000, nvlink_counter=10, counted_at=1_000_000)
    host.gpu(1, lacks=f"{BEFORE_HOPPER} pcie_counter nvlink_counter", pcie_now=50)
    async with source() as nvml:
        assert (await measured(nvml))[0].pcie_bytes_s is None
        host.gpu(0, pcie_counter=6000, nvlink_counter=20, counted_at=3_000_000)
        gpus = await measured(nvml)
        assert (gpus[0].pcie_bytes_s, gpus[0].nvlink_bytes_s) == (5000.0, 10 * 1024.0)
        assert (gpus[1].pcie_bytes_s, gpus[1].nvlink_bytes_s) == (100 * 1024.0, None)
        host.gpu(0, pcie_counter=1, counted_at=4_000_000)  # the driver was loaded again
        assert (await measured(nvml))[0].pcie_bytes_s is None


async def test_an_xid_is_reported_once_also_of_a_gpu_that_is_lost(nvml_host: Host) -> None:
    host = nvml_host(2)
    host.xid(0, 31)  # from before: somebody else's
    async with source() as nvml:
        assert (await measured(nvml))[0].xids == ()
        host.xid(0, 63)
        host.xid(1, 79)
        host.gpu(1, error=LOST)
        gpus = await measured(nvml)
        assert (gpus[0].xids, gpus[1].xids, gpus[1].temperature) == ((63,), (79,), None)
        assert list(await measured(nvml)) == [0]


async def test_a_gpu_that_vanishes_and_returns_is_left_out_and_measured_again(nvml_host: Host) -> None:
    host = nvml_host(3)
    async with source() as nvml:
        assert list(await measured(nvml)) == [0, 1, 2]
        host.gpu(1, error=LOST)
        assert list(await measured(nvml)) == [0, 2]
        host.gpu(1, error=0)
        host.set(count=2)
        await nvml.scan()  # samples start again after a scan that finds other GPUs
        assert list(await measured(nvml)) == [0, 1]


async def test_a_slice_has_its_own_memory_and_activity_and_the_heat_of_its_gpu(nvml_host: Host) -> None:
    nvml_host(2).gpu(0, **training(), slices=2)
    async with source() as nvml:
        ids = [gpu.id for gpu in (await nvml.scan()).gpus]
        await nvml.sample()
        gpus = await measured(nvml)
    assert [gpus[index].gpu for index in range(3)] == ids
    part = gpus[1]
    assert (part.utilization, part.tensor, part.temperature) == (0.97, 0.41, 62)
    assert (part.memory_total, part.power_watts) == (81559 * MIB // 2, None)


async def test_a_sample_that_hangs_costs_a_process_and_neither_scans_nor_later_samples(
    nvml_host: Host,
) -> None:
    host = nvml_host(2)
    async with source() as nvml:
        await nvml.scan()
        host.gpu(0, sample_delay_ms=60_000)
        nvml._sample_timeout = 0.3
        with pytest.raises(ScanFailed, match=r"did not answer within 0\.3 s"):
            await nvml.sample()
        assert len((await nvml.scan()).gpus) == 2
        host.gpu(0, sample_delay_ms=0)
        nvml._sample_timeout = 120.0
        assert list(await measured(nvml)) == [0, 1]


async def test_nothing_is_measured_while_a_process_hangs_that_no_signal_ends(
    nvml_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = nvml_host(1)
    async with source() as nvml:
        await nvml.scan()
        stuck, process = nvml._process, nvml._process
        assert process is not None
        monkeypatch.setattr(process, "kill", lambda: None)
        host.gpu(0, sample_delay_ms=60_000)
        nvml._sample_timeout = 0.1
        with pytest.raises(ScanFailed, match="did not answer"):
            await nvml.sample()
        with pytest.raises(ScanFailed, match="scans come first"):
            await nvml.sample()
        assert len((await nvml.scan()).gpus) == 1
        monkeypatch.undo()
        stuck.kill()


async def test_a_host_without_a_driver_is_recognized_by_a_sample(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    async with source() as nvml:
        with pytest.raises(NoNvidiaDriver):
            await nvml.sample()


@pytest.mark.parametrize(
    ("gpus", "ids"), [("2xH100", ["0", "1"]), ("cpu", ["cpu"]), ("nvml", [uuid(0), "cpu"])]
)
def test_a_command_without_a_daemon_measures_also_gpus_that_a_setting_names(
    nvml_host: Host, tmp_path: Path, gpus: str, ids: list[str]
) -> None:
    host = nvml_host(2)
    host.gpu(0, temperature=50)
    host.gpu(1, temperature=70, uuid="cpu")
    settings = load_settings(env={"GPUS": gpus, "DATA_DIR": str(tmp_path)}, env_file=None)
    fleet, _, samples = scan_and_sample_once(settings)
    assert [gpu.id for gpu in fleet.inventory.gpus] == ids
    assert [sample.gpu for sample in samples] == ids
    assert samples[-1].temperature == 70
