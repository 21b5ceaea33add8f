"""Which device files a run may see."""

from __future__ import annotations

from pathlib import Path

import pytest

from miner.engines.process.sandbox import device_files

#: As /proc/driver/nvidia/gpus/*/information has it; numbers of device files need not follow the bus.
INFORMATION = """\
Model: \t\t NVIDIA H100 80GB HBM3
IRQ:   \t\t 220
GPU UUID: \t GPU-{uuid}
Video BIOS: \t 96.00.5e.00.01
Bus Type: \t PCIe
Bus Location: \t {bus}
Device Minor: \t {minor}
GPU Excluded:\t No
"""


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    driver, devices = tmp_path / "gpus", tmp_path / "dev"
    for bus, uuid, minor in (
        ("0000:18:00.0", "aaaa", 2),
        ("0000:2a:00.0", "bbbb", 0),
        ("0000:3a:00.0", "cccc", 1),
    ):
        (driver / bus).mkdir(parents=True)
        (driver / bus / "information").write_text(INFORMATION.format(uuid=uuid, bus=bus, minor=minor))
    devices.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"):
        (devices / name).touch()
    return driver, devices


def names(gpus: tuple[str, ...], machine: tuple[Path, Path]) -> list[str]:
    return [path.name for path in device_files(gpus, *machine)]


def test_no_gpu_no_device(machine: tuple[Path, Path]) -> None:
    assert names((), machine) == []


def test_a_gpu_brings_its_own_device_file_and_the_drivers(machine: tuple[Path, Path]) -> None:
    assert names(("GPU-aaaa",), machine) == ["nvidiactl", "nvidia-uvm", "nvidia2"]
    assert names(("GPU-cccc", "GPU-bbbb"), machine) == ["nvidiactl", "nvidia-uvm", "nvidia1", "nvidia0"]


def test_an_index_is_the_order_of_the_bus(machine: tuple[Path, Path]) -> None:
    assert names(("0",), machine) == ["nvidiactl", "nvidia-uvm", "nvidia2"]


def test_all_are_shown_where_the_driver_does_not_say_which(machine: tuple[Path, Path]) -> None:
    everything = ["nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1", "nvidia2", "nvidia-caps"]
    assert names(("MIG-1234-5678",), machine) == everything
    assert [path.name for path in device_files(("0",), Path("/no/such"), machine[1])] == everything
