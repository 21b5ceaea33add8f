"""Where control groups can be made, on machines of either kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from miner.engines.process import cgroups
from miner.engines.process.cgroups import Cgroups, detect_cgroups


def line(point: Path, kind: str, options: str) -> str:
    return f"31 23 0:28 / {point} rw,relatime - {kind} {kind} rw,{options}\n"


def first_version(tmp_path: Path, own: str = "/") -> tuple[str, str]:
    """Directories like cgroups; the files that the kernel would make are there already."""
    for name in ("memory", "pids"):
        folder = tmp_path / name / own.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
    mounts = "".join(line(tmp_path / name, "cgroup", name) for name in ("memory", "pids"))
    return mounts + line(tmp_path / "unified", "cgroup2", "rw"), f"8:pids:{own}\n4:memory:{own}\n0::/\n"


def kernel_files(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("")


@pytest.mark.parametrize("own", ["/", "/daemon/sub"])
def test_version_one_has_a_folder_for_each_controller(own: str, tmp_path: Path) -> None:
    mounts, ours = first_version(tmp_path, own)
    memory, pids = tmp_path / "memory" / own.lstrip("/"), tmp_path / "pids" / own.lstrip("/")
    kernel_files(memory / "probe", "memory.limit_in_bytes")
    kernel_files(pids / "probe", "pids.max")
    found = detect_cgroups("probe", mounts, ours)
    assert found == Cgroups((memory, pids), 1)


def test_a_cgroup_path_of_the_host_is_not_used_in_a_container(tmp_path: Path) -> None:
    mounts, _ = first_version(tmp_path)
    kernel_files(tmp_path / "memory" / "probe", "memory.limit_in_bytes")
    kernel_files(tmp_path / "pids" / "probe", "pids.max")
    found = detect_cgroups("probe", mounts, "8:pids:/docker/abc\n4:memory:/docker/abc\n")
    assert found == Cgroups((tmp_path / "memory", tmp_path / "pids"), 1)


def test_version_two_has_one_folder(tmp_path: Path) -> None:
    kernel_files(tmp_path, "cgroup.subtree_control")
    kernel_files(tmp_path / "probe", "memory.max", "pids.max")
    assert detect_cgroups("probe", line(tmp_path, "cgroup2", "x"), "0::/\n") == Cgroups((tmp_path,), 2)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory +pids"


def test_the_reason_is_given_where_no_cgroup_can_be_made(tmp_path: Path) -> None:
    assert "are mounted" in str(detect_cgroups("probe", "", "0::/\n"))
    missing = tmp_path / "none"
    assert str(missing) in str(detect_cgroups("probe", line(missing, "cgroup2", "x"), "0::/\n"))
    kernel_files(tmp_path, "cgroup.subtree_control")
    assert "no memory.max" in str(detect_cgroups("probe", line(tmp_path, "cgroup2", "x"), "0::/\n"))


@pytest.mark.parametrize(
    ("version", "limit", "events"),
    [(1, "memory.limit_in_bytes", "memory.oom_control"), (2, "memory.max", "memory.events")],
)
def test_limits_are_written_where_the_version_has_them(
    version: int, limit: str, events: str, tmp_path: Path
) -> None:
    kernel_files(tmp_path / "run", limit, "pids.max", events)
    made = Cgroups((tmp_path,), version)
    folders = made.make("run", 1 << 30, 77)
    assert (tmp_path / "run" / limit).read_text() == str(1 << 30)
    assert (tmp_path / "run" / "pids.max").read_text() == "77"
    assert made.oom_files(folders) == (tmp_path / "run" / events,)


def test_without_a_memory_limit_none_is_written(tmp_path: Path) -> None:
    kernel_files(tmp_path / "run", "memory.max", "pids.max")
    Cgroups((tmp_path,), 2).make("run", None, 77)
    assert (tmp_path / "run" / "memory.max").read_text() == ""


def test_missing_cgroups_are_killed_and_removed_without_an_error(tmp_path: Path) -> None:
    cgroups.kill((tmp_path / "none",))
    cgroups.remove((tmp_path / "none",))
    (tmp_path / "empty").mkdir()
    cgroups.remove((tmp_path / "empty",))
    assert not (tmp_path / "empty").exists()
