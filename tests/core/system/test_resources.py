"""What a container may use, and what of it is free."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.system import resources

GB = 10**9
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
    monkeypatch.setattr(resources, "_CGROUP_CPU", tmp_path / "cpu.max")
    monkeypatch.setattr(resources, "_CGROUP_QUOTA", (tmp_path / "quota", tmp_path / "period"))
    monkeypatch.setattr(resources, "_CGROUP_MEMORY", (tmp_path / "memory.max",))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert (resources.usable_cores(), resources.usable_memory()) == (cores, memory)


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
    monkeypatch.setattr(resources, "_CGROUP_MEMORY", both)
    monkeypatch.setattr(resources, "_MEMINFO", tmp_path / "meminfo")
    assert resources.free_memory() == 4 * GB
    (tmp_path / "meminfo").write_text("MemAvailable: 1000000 kB\n", encoding="ascii")
    assert resources.free_memory() == 1_024_000_000
