"""Make control groups where the machine allows it: to limit memory and processes, and to kill a whole run.

Rented pods mostly do not allow it; runs go on without, and the sandbox's own limit on processes holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from core.system.wrapper import kill_until_gone

MOUNTS, OWN = Path("/proc/self/mountinfo"), Path("/proc/self/cgroup")
NEEDED = ("memory", "pids")
EMPTY_S = 5.0
_OOM_FILES = {1: "memory.oom_control", 2: "memory.events"}
_MEMORY_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}


@dataclass(frozen=True, slots=True)
class Cgroups:
    """The parents of our groups: one directory with version 2, one for each controller with version 1."""

    parents: tuple[Path, ...]
    version: int

    def make(self, name: str, memory: int | None, pids: int) -> tuple[Path, ...]:
        """Make the groups of a run, with its limits; `OSError` when the kernel refuses."""
        folders = tuple(parent / name for parent in self.parents)
        for folder in folders:
            folder.mkdir(exist_ok=True)
        if memory:
            _set(folders, _MEMORY_LIMIT[self.version], str(memory))
        _set(folders, "pids.max", str(pids))
        return folders

    def oom_files(self, folders: Iterable[Path]) -> tuple[Path, ...]:
        files = (folder / _OOM_FILES[self.version] for folder in folders)
        return tuple(file for file in files if file.exists())


def kill(folders: tuple[Path, ...]) -> None:
    """Kill everything in the groups; first they are forbidden to fork."""
    with contextlib.suppress(OSError):
        _set(folders, "pids.max", "0")
    kill_until_gone(lambda: _members(folders), EMPTY_S)


def remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def detect_cgroups(name: str, mounts: str | None = None, own: str | None = None) -> Cgroups | str:
    """Find where groups can be made, by making one called `name`, or return why they cannot."""
    why = "no cgroups with limits on memory and processes are mounted"
    mounts, own = MOUNTS.read_text() if mounts is None else mounts, OWN.read_text() if own is None else own
    for candidate in _candidates(mounts, own):
        try:
            _enable(candidate)
            candidate.make(name, 1 << 30, 100)
        except OSError as error:
            why = f"{error.filename or candidate.parents[0]}: {error.strerror or error}"
        else:
            return candidate
        finally:
            remove(parent / name for parent in candidate.parents)
    return why


def _members(folders: Iterable[Path]) -> Iterator[int]:
    for folder in folders:
        with contextlib.suppress(OSError):
            yield from map(int, (folder / "cgroup.procs").read_text().split())


def _set(folders: tuple[Path, ...], name: str, value: str) -> None:
    for folder in folders:
        if (folder / name).exists():
            (folder / name).write_text(value)
            return
    raise FileNotFoundError(f"no {name} in {', '.join(map(str, folders))}")


def _candidates(mounts: str, own: str) -> Iterator[Cgroups]:
    """Below our own group, whose limits then apply to our runs as well; else at the top."""
    mount_points = dict(_mount_points(mounts))
    own_paths = {
        kind: path
        for line in own.splitlines()
        for _, kinds, path in [line.split(":", 2)]
        for kind in kinds.split(",")
    }
    if all(kind in mount_points for kind in NEEDED):
        yield Cgroups(tuple(_below(mount_points[kind], own_paths.get(kind, "/")) for kind in NEEDED), 1)
    elif "" in mount_points:
        yield Cgroups((_below(mount_points[""], own_paths.get("", "/")),), 2)
        yield Cgroups((mount_points[""],), 2)


def _mount_points(mounts: str) -> Iterator[tuple[str, Path]]:
    """Yield each controller with its mount point; version 2 has an empty name."""
    for line in mounts.splitlines():
        fields, _, tail = line.partition(" - ")
        kind, _, options = tail.split(maxsplit=2)
        point = Path(fields.split()[4])
        if kind == "cgroup2":
            yield "", point
        elif kind == "cgroup":
            yield from ((word, point) for word in options.split(",") if word in NEEDED)


def _below(point: Path, path: str) -> Path:
    """The path below the mount point; in a container it may be the host's, and not exist."""
    below = point / path.lstrip("/")
    return below if below.is_dir() else point


def _enable(cgroups: Cgroups) -> None:
    if cgroups.version == 2:
        (cgroups.parents[0] / "cgroup.subtree_control").write_text("+memory +pids")
