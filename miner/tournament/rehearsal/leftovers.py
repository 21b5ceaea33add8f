"""Find and remove what killed rehearsals leave in Docker and on the disk.

A rehearsal keeps the file `.rehearsal` in its output directory locked. The kernel ends the lock with the
process, however that ends, so a lock that is held means a rehearsal that runs. Containers and networks have
a path in that directory as their label. Images are named in the file: a label would be one more step of
their build.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from core.domain.errors import GodMinerError
from core.system.files import remove_tree
from miner.backends.docker.client import DockerClient, DockerRefused
from miner.tournament.rehearsal.container import LABEL, take_over

RECORD = ".rehearsal"
#: The directory of the opponent's checkout, and in each task's directory that of its checkpoints.
OPPONENT = "opponent"
#: The name of all images that rehearsals build; their tags differ.
IMAGE = "god-miner-rehearsal"
_BUILD, _STEP, _KEPT = "build", "step", "kept"
#: What an output directory holds besides the report and the logs.
_LARGE = (
    "checkout",
    OPPONENT,
    *(
        f"*/{name}"
        for name in ("cache", "made", "checkpoints", "killed", "score-*", OPPONENT, f"{OPPONENT}s-model")
    ),
)
_REMOVE_S = 300.0


class OutputInUse(GodMinerError):
    """The directory is that of another rehearsal."""

    code = "output_in_use"


class RehearsalState(StrEnum):
    RUNNING = "running"
    #: It left without removing what it had made.
    KILLED = "killed"
    #: It ended, with --keep.
    KEPT = "kept"
    #: Its directory is gone, or belongs to another user.
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class RehearsalRecord:
    """The locked file of a rehearsal that runs."""

    handle: int

    def _add(self, *words: str) -> None:
        os.write(self.handle, f"{' '.join(words)}\n".encode())

    def add_build(self, image: str) -> None:
        self._add(_BUILD, image)

    def add_step(self, image: str) -> None:
        """Record the image of a build's last step, which has no name."""
        self._add(_STEP, image)

    def keep(self) -> None:
        """Note that what is there now is wanted."""
        self._add(_KEPT)


@contextmanager
def rehearsal_record(output: Path) -> Iterator[RehearsalRecord]:
    """Mark `output` as that of a running rehearsal."""
    try:
        handle = os.open(output / RECORD, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        raise OutputInUse(
            f"{output} is the directory of another rehearsal: name a new one by --output"
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield RehearsalRecord(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Leftover:
    """One thing that a rehearsal has made."""

    #: container, directory, image or network
    kind: str
    #: As Docker knows it, or a path.
    name: str
    state: RehearsalState
    #: The rehearsal's output directory.
    output: Path | None = None
    size_bytes: int | None = None

    def may_go(self, *, everything: bool) -> bool:
        """Return True if it is to be removed. `everything` includes what was kept and what has no known
        owner."""
        if everything:
            return self.state is not RehearsalState.RUNNING
        return self.state is RehearsalState.KILLED

    def as_dict(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "name": self.name,
            "rehearsal": str(self.state),
            "output": str(self.output) if self.output else None,
            "size_bytes": self.size_bytes,
        }


def find_leftovers(client: DockerClient, outputs: Iterable[Path]) -> list[Leftover]:
    """All that rehearsals have made, those that run too, in the order of its removal. `outputs`: directories
    to look at besides those that Docker's labels name."""
    return client.call_blocking(lambda api: list(_find(api, outputs)), client.create_timeout_s)


def _find(api: Any, outputs: Iterable[Path]) -> Iterator[Leftover]:
    labelled = {"label": LABEL}
    containers = [
        (str(one["Names"][0]).lstrip("/"), _output_of(one["Labels"][LABEL]))
        for one in api.containers(all=True, filters=labelled)
    ]
    networks = [(one["Name"], _output_of(one["Labels"][LABEL])) for one in api.networks(filters=labelled)]
    known = {path.resolve() for path in outputs if (path / RECORD).is_file()}
    known |= {output for _, output in (*containers, *networks) if output}
    states = {output: _state(output) for output in sorted(known)}

    def found(kind: str, name: str, output: Path | None, size_bytes: int | None = None) -> Leftover:
        state = states[output] if output else RehearsalState.UNKNOWN
        return Leftover(kind, name, state, output, size_bytes)

    yield from (found("container", *one) for one in containers)
    for output in states:
        if large := _large(output):
            yield found("directory", str(output), output, sum(map(_size, large)))
    tags = {tag: int(one["Size"]) for one in api.images(name=IMAGE) for tag in one["RepoTags"] or ()}
    for output in states:
        for tag, steps in _builds(output):
            if tag in tags:
                yield found("image", tag, output, tags.pop(tag))
            elif step := _newest(api, steps):
                yield found("image", step, output)
    yield from (found("image", tag, None, size) for tag, size in tags.items())
    yield from (found("network", *one) for one in networks)


def remove_leftover(client: DockerClient, leftover: Leftover) -> str | None:
    """Why it could not be removed."""
    try:
        if leftover.kind == "directory":
            return _remove_large(client, Path(leftover.name))
        client.call_blocking(lambda api: _remove(api, leftover), _REMOVE_S)
    except DockerRefused as refused:
        return None if refused.status == 404 else str(refused)
    return None


def _remove(api: Any, leftover: Leftover) -> None:
    if leftover.kind == "container":
        api.remove_container(leftover.name, v=True, force=True)
    elif leftover.kind == "image":
        api.remove_image(leftover.name, force=True)
    else:
        api.remove_network(leftover.name)


def _remove_large(client: DockerClient, output: Path) -> str | None:
    if os.getuid() != 0:
        # The trainer's files are root's; an image of the same rehearsal may still be there.
        for image, _ in _builds(output):
            with suppress(GodMinerError):
                take_over(client, image, output)
    for path in _large(output):
        remove_tree(path)
    left = _large(output)
    return f"some files are another user's: sudo rm -r {' '.join(map(str, left))}" if left else None


# — the record


def _output_of(label: str) -> Path | None:
    """The directory of the rehearsal that a path belongs to."""
    path = Path(label)
    try:
        return next((one for one in (path, *path.parents) if (one / RECORD).is_file()), None)
    except OSError:
        return None


def _state(output: Path) -> RehearsalState:
    try:
        with (output / RECORD).open("rb") as record:
            fcntl.flock(record, fcntl.LOCK_SH | fcntl.LOCK_NB)
            kept = f"{_KEPT}\n".encode() in record
    except BlockingIOError:
        return RehearsalState.RUNNING
    except OSError:
        return RehearsalState.UNKNOWN
    return RehearsalState.KEPT if kept else RehearsalState.KILLED


def _builds(output: Path) -> list[tuple[str, list[str]]]:
    """The name of each image, and the images of its steps, oldest first."""
    found: list[tuple[str, list[str]]] = []
    with suppress(OSError):
        for line in (output / RECORD).read_text("utf-8", "replace").splitlines():
            word, _, name = line.partition(" ")
            if word == _BUILD:
                found.append((name, []))
            elif word == _STEP and found:
                found[-1][1].append(name)
    return found


def _newest(api: Any, steps: Sequence[str]) -> str | None:
    """The newest step's image that is there; the ones before go with it."""
    import docker

    for step in reversed(steps):
        with suppress(docker.errors.ImageNotFound):
            api.inspect_image(step)
            return step
    return None


# — the directory


def _large(output: Path) -> list[Path]:
    """Directories of an output that a rehearsal removes at its end."""
    with suppress(OSError):
        return [path for pattern in _LARGE for path in sorted(output.glob(pattern)) if not path.is_symlink()]
    return []


def _size(folder: Path) -> int:
    """Return the bytes that removal frees: another name of an operator's file frees nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                status = os.lstat(os.path.join(place, name))
                total += status.st_size if status.st_nlink == 1 else 0
    return total
