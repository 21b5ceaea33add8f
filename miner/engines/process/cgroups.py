"""Control groups, where this machine lets us make some: a limit on memory and on processes, and a way to end
everything in one that nothing slips out of.

Rented pods mostly do not let us; runs go on without then, and the sandbox's own limit on processes holds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MOUNTS, OWN = Path("/proc/self/mountinfo"), Path("/proc/self/cgroup")
NEEDED = ("memory", "pids")
EMPTY_S = 5.0
_OOM_FILES = {1: "memory.oom_control", 2: "memory.events"}
_MEMORY_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Where groups are made: in one folder with version 2, in one for each controller with version 1."""

    parents: tuple[Path, ...]
    version: int

    def make(self, name: str, memory: int | None, pids: int) -> tuple[Path, ...]:
        """The groups of a run, with its limits; `OSError` when the kernel will not."""
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
    """Everything in them, however fast it forks: it may not any more."""
    with contextlib.suppress(OSError):
        _set(folders, "pids.max", "0")
    ends = time.monotonic() + EMPTY_S
    while (pids := set(_members(folders))) and time.monotonic() < ends:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def detect(name: str, mounts: str | None = None, own: str | None = None) -> Cgroups | str:
    """Groups, tried out with one called `name`; or why there are none."""
    why = "no cgroups with limits on memory and processes are mounted"
    mounts, own = MOUNTS.read_text() if mounts is None else mounts, OWN.read_text() if own is None else own
    for found in _candidates(mounts, own):
        try:
            _enable(found)
            found.make(name, 1 << 30, 100)
        except OSError as error:
            why = f"{error.filename or found.parents[0]}: {error.strerror or error}"
        else:
            return found
        finally:
            remove(parent / name for parent in found.parents)
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
    """Below our own group, whose limits then hold for our runs too; else at the top."""
    places = dict(_places(mounts))
    ours = {
        kind: path
        for line in own.splitlines()
        for _, kinds, path in [line.split(":", 2)]
        for kind in kinds.split(",")
    }
    if all(kind in places for kind in NEEDED):
        yield Cgroups(tuple(_below(places[kind], ours.get(kind, "/")) for kind in NEEDED), 1)
    elif "" in places:
        yield Cgroups((_below(places[""], ours.get("", "/")),), 2)
        yield Cgroups((places[""],), 2)


def _places(mounts: str) -> Iterator[tuple[str, Path]]:
    """Where each controller is mounted; version 2 has an empty name."""
    for line in mounts.splitlines():
        fields, _, tail = line.partition(" - ")
        kind, _, options = tail.split(maxsplit=2)
        point = Path(fields.split()[4])
        if kind == "cgroup2":
            yield "", point
        elif kind == "cgroup":
            yield from ((word, point) for word in options.split(",") if word in NEEDED)


def _below(point: Path, path: str) -> Path:
    """In a container the path may be told as the host sees it."""
    below = point / path.lstrip("/")
    return below if below.is_dir() else point


def _enable(found: Cgroups) -> None:
    if found.version == 2:
        (found.parents[0] / "cgroup.subtree_control").write_text("+memory +pids")
