"""Where control groups can be made, on machines of either kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from miner.backends.process import cgroups
from miner.backends.process.cgroups import Cgroups, detect_cgroups


def line(point: Path, kind: str, options: str) -> str:
    return f"31 23 0:28 / {point} rw,relatime - {kind} {kind} rw,{options}\n"


def kernel_files(folder: Path, *names: str) -> None:
    """The files that the kernel would make in a group."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("")


@pytest.mark.parametrize(
    ("own", "used"),
    [("/", "/"), ("/daemon/sub", "/daemon/sub"), ("/docker/abc", "/")],
    ids=["top", "below", "a path of the host, in a container"],
)
def test_version_one_has_a_folder_for_each_controller(own: str, used: str, tmp_path: Path) -> None:
    memory, pids = (tmp_path / name / used.lstrip("/") for name in ("memory", "pids"))
    kernel_files(memory / "probe", "memory.limit_in_bytes")
    kernel_files(pids / "probe", "pids.max")
    mounts = "".join(line(tmp_path / name, "cgroup", name) for name in ("memory", "pids"))
    mounts += line(tmp_path / "unified", "cgroup2", "rw")
    found = detect_cgroups("probe", mounts, f"8:pids:{own}\n4:memory:{own}\n0::/\n")
    assert found == Cgroups((memory, pids), 1)


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
    groups = Cgroups((tmp_path,), version)
    folders = groups.make("run", 1 << 30, 77)
    assert (tmp_path / "run" / limit).read_text() == str(1 << 30)
    assert (tmp_path / "run" / "pids.max").read_text() == "77"
    assert groups.oom_files(folders) == (tmp_path / "run" / events,)


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
