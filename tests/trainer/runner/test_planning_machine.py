"""What a run that plans for itself sees of its machine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core.domain.hardware import CPU, GpuSet
from trainer.runner import planning

GB = 10**9


class Driver(SimpleNamespace):
    """The driver's library with these GPUs: (name, memory, capability)."""

    def __init__(self, *gpus: tuple[str, int, tuple[int, int]]) -> None:
        super().__init__()
        self.gpus, self.closed = gpus, False

    def nvmlInit(self) -> None:
        if not self.gpus:
            raise RuntimeError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:
        self.closed = True

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, at: int) -> int:
        return at

    def nvmlDeviceGetName(self, at: int) -> bytes:
        return self.gpus[at][0].encode()

    def nvmlDeviceGetMemoryInfo(self, at: int) -> Any:
        return SimpleNamespace(total=self.gpus[at][1])

    def nvmlDeviceGetCudaComputeCapability(self, at: int) -> tuple[int, int]:
        return self.gpus[at][2]


H100 = ("NVIDIA H100 80GB HBM3", 85_520_809_984, (9, 0))
T4 = ("Tesla T4", 16_106_127_360, (7, 5))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No torch, as in an image trainer's own interpreter, and these GPUs."""
    plain = planning.importlib.util.find_spec
    monkeypatch.setattr(
        planning.importlib.util, "find_spec", lambda name: None if name == "torch" else plain(name)
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(*gpus: tuple[str, int, tuple[int, int]]) -> Driver:
        library = Driver(*gpus)
        monkeypatch.setitem(sys.modules, "pynvml", library)
        return library

    return put


def test_four_gpus_of_one_kind(driver: Any) -> None:
    library = driver(H100, H100, H100, H100)
    gpus = planning.visible_gpus()
    assert (gpus.kind.name, gpus.count) == ("H100-SXM", 4)
    assert library.closed


def test_of_several_kinds_those_with_the_most_memory_are_used(driver: Any) -> None:
    driver(T4, H100, T4)
    gpus = planning.visible_gpus()
    assert (gpus.kind.name, gpus.count) == ("H100-SXM", 1)


def test_gpus_that_cuda_may_not_use_are_not_counted(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(H100, H100, H100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert planning.visible_gpus().count == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert planning.visible_gpus().is_cpu


def test_without_a_driver_there_is_the_cpu(driver: Any) -> None:
    driver()
    assert planning.visible_gpus().is_cpu


def test_the_disk_is_the_one_that_checkpoints_lie_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "visible_gpus", lambda: GpuSet(kind=CPU, count=1))
    free = {tmp_path: 7 * GB, Path("/"): GB}
    monkeypatch.setattr(planning.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
    assert planning.detect_machine(tmp_path).disk_free_bytes == 7 * GB
