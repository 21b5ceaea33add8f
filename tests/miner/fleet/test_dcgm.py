"""Tensor-core and memory activity by DCGM's command."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from miner.fleet.dcgm import DcgmStream
from miner.fleet.nvml import NvmlSource
from tests.doubles.dcgmi import FakeDcgmi
from tests.doubles.nvml import BEFORE_HOPPER, training
from tests.miner.fleet.test_nvml_samples import Host

pytestmark = pytest.mark.process


ROWS = [
    "GPU 0     0       0.412    0.173    ",
    "GPU 1     2       N/A      0.500    ",
    "GPU-I 0   N/A     0.1      0.1",
]


def test_the_newest_line_of_each_gpu_counts_by_its_number_in_nvml(tmp_path: Path) -> None:
    dcgmi = FakeDcgmi(tmp_path, ROWS)
    stream = DcgmStream(str(dcgmi.program))
    try:
        while not (found := stream.latest()).keys() >= {0, 2}:
            time.sleep(0.01)
        assert found == {0: (0.412, 0.173), 2: (None, 0.5)}
        assert dcgmi.calls == ["dmon -e 52,1004,1005 -d 5000"]
        assert stream._process is not None
        stream._process.kill()
    finally:
        stream.close()


def test_a_command_that_ends_is_not_started_again_at_once_and_its_values_grow_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("miner.fleet.dcgm.time.monotonic", lambda: now)
    dcgmi = FakeDcgmi(tmp_path, ROWS, ends=True)
    stream = DcgmStream(str(dcgmi.program))
    while not stream.latest():
        time.sleep(0.01)
    while stream._process is not None:
        time.sleep(0.01)
        stream.latest()
    assert stream.latest()
    now += 20
    assert (stream.latest(), len(dcgmi.calls)) == ({}, 1)
    now += 600
    while len(dcgmi.calls) < 2:
        stream.latest()
        time.sleep(0.01)
    stream.close()


async def test_gpus_without_gpm_get_it_from_dcgm_where_it_is_installed(
    nvml_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = nvml_host(2)
    host.gpu(0, **training(), lacks=BEFORE_HOPPER)
    host.gpu(1, **training(tensor=20))
    dcgmi = FakeDcgmi(tmp_path / "bin", ROWS)
    monkeypatch.setenv("PATH", f"{dcgmi.folder}:/usr/bin:/bin")
    nvml = NvmlSource(sample_timeout=120.0, start_timeout=120.0)
    try:
        while (gpus := await nvml.sample())[0].sample.tensor is None:
            pass
        assert (gpus[0].sample.tensor, gpus[0].sample.dram) == (0.412, 0.173)
        assert (await nvml.sample())[1].sample.tensor == 0.2
    finally:
        await nvml.close()
