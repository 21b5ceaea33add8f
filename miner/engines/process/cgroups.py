"""Control groups, where this machine lets us make some: a limit on memory and on processes, and a way to end
everything in one that nothing slips out of.

Rented pods mostly do not let us; runs go on without then, and the sandbox's own limit on processes holds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOUNTS, OWN = Path("/proc/self/mountinfo"), Path("/proc/self/cgroup")
NEEDED = ("memory", "pids")
EMPTY_S = 5.0


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Where groups are made: one folder with version 2, one for each controller with version 1."""

    parents: tuple[Path, ...]
    version: int

    def folders(self, key: str) -> tuple[Path, ...]:
        return tuple(parent / key for parent in self.parents)

    def make(self, key: str, memory: int | None, pids: int) -> tuple[Path, ...]:
        """The groups of a run, with its limits; `OSError` when the kernel will not."""
        for folder in self.folders(key):
            folder.mkdir(parents=True, exist_ok=True)
        if memory:
            limit = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
            self._set(key, limit, str(memory))
        self._set(key, "pids.max", str(pids))
        return self.folders(key)

    def oom_files(self, key: str) -> tuple[Path, ...]:
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        return tuple(folder / name for folder in self.folders(key) if (folder / name).exists())

    def kill(self, key: str) -> None:
        """Everything in it, however fast it forks: it may not any more."""
        with contextlib.suppress(OSError):
            self._set(key, "pids.max", "0")
        ends = time.monotonic() + EMPTY_S
        while (pids := set(self._members(key))) and time.monotonic() < ends:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def remove(self, key: str) -> None:
        for folder in self.folders(key):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _members(self, key: str) -> Iterator[int]:
        for folder in self.folders(key):
            with contextlib.suppress(OSError):
                yield from map(int, (folder / "cgroup.procs").read_text().split())

    def _set(self, key: str, name: str, value: str) -> None:
        for folder in self.folders(key):
            if (folder / name).exists():
                (folder / name).write_text(value)
                return
        raise FileNotFoundError(f"no {name} in {', '.join(map(str, self.folders(key)))}")


def detect(name: str, mounts: str | None = None, own: str | None = None) -> Cgroups | str:
    """Groups below one called `name`, tried out; or why there are none."""
    why = "no cgroups with limits on memory and processes are mounted"
    for found in _candidates(name, mounts or MOUNTS.read_text(), own or OWN.read_text()):
        try:
            _enable(found)
            found.make("probe", 1 << 30, 100)
            found.remove("probe")
        except OSError as error:
            found.remove("probe")
            why = f"{error.filename or found.parents[0]}: {error.strerror or error}"
        else:
            return found
    return why


def _candidates(name: str, mounts: str, own: str) -> Iterator[Cgroups]:
    """Below our own group, whose limits then hold for our runs too; else at the top."""
    places = dict(_places(mounts))
    ours = {kind: path for line in own.splitlines() for _, kind, path in [line.split(":", 2)]}
    if all(kind in places for kind in NEEDED):
        yield Cgroups(tuple(_below(places[kind], ours.get(kind, "/")) / name for kind in NEEDED), 1)
        return
    if "" in places:
        yield Cgroups((_below(places[""], ours.get("", "/")) / name,), 2)
        yield Cgroups((places[""] / name,), 2)


def _places(mounts: str) -> Iterator[tuple[str, Path]]:
    """Where each controller is mounted; the one of version 2 has an empty name."""
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
    for parent in found.parents:
        parent.mkdir(exist_ok=True)
    if found.version == 2:
        top = found.parents[0]
        for folder in (top.parent, top):
            (folder / "cgroup.subtree_control").write_text("+memory +pids")
