"""What a run that plans for itself sees of its machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core.domain.hardware import CPU, GpuSet
from core.system import memory as memory_of_machine
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


WHOLE_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        ({"cpu.max": "150000 100000", "memory.max": f"{2 * GB}"}, 1, 2 * GB),
        ({"cpu.max": "max 100000", "memory.max": "max"}, 8, WHOLE_MEMORY),
        ({"quota": "300000", "period": "100000"}, 3, WHOLE_MEMORY),
    ],
    ids=["limits", "none", "an older kernel's"],
)
def test_a_containers_limits_count_and_not_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int, memory: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n", encoding="ascii")
    monkeypatch.setattr(planning, "_CGROUP_CPU", tmp_path / "cpu.max")
    monkeypatch.setattr(planning, "_CGROUP_QUOTA", (tmp_path / "quota", tmp_path / "period"))
    monkeypatch.setattr(memory_of_machine, "_CGROUP_MEMORY", (tmp_path / "memory.max",))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert (planning.usable_cores(), memory_of_machine.usable_memory()) == (cores, memory)


@pytest.mark.parametrize(
    ("limit", "taken", "cache"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_what_a_container_has_taken_is_not_free_but_for_its_cache_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, taken: str, cache: str
) -> None:
    files = {
        limit: f"{8 * GB}",
        taken: f"{5 * GB}",
        "memory.stat": f"anon {4 * GB}\n{cache} {GB}\nactive_file 0",
        "meminfo": "MemTotal: 60000000 kB\nMemAvailable: 50000000 kB",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n", encoding="ascii")
    nowhere = tmp_path / "nowhere" / limit
    both = (tmp_path / limit, nowhere) if limit == "memory.max" else (nowhere, tmp_path / limit)
    monkeypatch.setattr(memory_of_machine, "_CGROUP_MEMORY", both)
    monkeypatch.setattr(memory_of_machine, "_MEMINFO", tmp_path / "meminfo")
    assert memory_of_machine.free_memory() == 4 * GB
    (tmp_path / "meminfo").write_text("MemAvailable: 1000000 kB\n", encoding="ascii")
    assert memory_of_machine.free_memory() == 1_024_000_000


def test_the_disk_is_the_one_that_checkpoints_lie_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "visible_gpus", lambda: GpuSet(kind=CPU, count=1))
    free = {tmp_path: 7 * GB, Path("/"): GB}
    monkeypatch.setattr(planning.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
    assert planning.detect_machine(tmp_path).disk_free_bytes == 7 * GB
