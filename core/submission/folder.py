"""What lies in a folder that somebody else wrote, looked at without following or opening anything odd."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from core.submission.faults import BadSubmission, Fault, FaultKind, shown

#: Far more than any submission has; a folder with more is an attack or a mistake.
MAX_ENTRIES = 20_000
MAX_DEPTH = 12
#: Changes whenever a file's content may have: device, inode, size, time of the last write.
Identity = tuple[int, int, int, int]
_PLAIN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Entry:
    """A regular file, by its path inside the folder."""

    path: str
    size: int
    identity: Identity


@dataclass(frozen=True, slots=True)
class Listing:
    files: tuple[Entry, ...]
    #: Links, pipes, sockets, devices, unreadable folders, names that are no text.
    odd: tuple[Fault, ...]

    def names(self) -> frozenset[str]:
        return frozenset(entry.path for entry in self.files)


def listing(folder: Path) -> Listing:
    """Every regular file below `folder`, in order of their paths; `BadSubmission` for no folder, or for one
    without an end."""
    files: list[Entry] = []
    odd: list[Fault] = []
    try:
        for found in _walk(folder, "", 0):
            (files if isinstance(found, Entry) else odd).append(found)  # type: ignore[arg-type]
            if len(files) + len(odd) > MAX_ENTRIES:
                raise _too_much(folder, f"more than {MAX_ENTRIES} entries")
    except OSError as error:
        rule = f"can't be looked at: {error.strerror or error}"
        raise BadSubmission(str(folder), [Fault(FaultKind.UNREADABLE, str(folder), "", rule)]) from None
    return Listing(tuple(sorted(files, key=lambda entry: entry.path)), tuple(odd))


def _walk(folder: Path, inside: str, depth: int) -> Iterator[Entry | Fault]:
    if depth > MAX_DEPTH:
        raise _too_much(folder, f"folders {MAX_DEPTH} deep")
    with os.scandir(folder) as entries:
        for entry in entries:
            path = f"{inside}{entry.name}"
            found = entry.stat(follow_symlinks=False)
            if not _is_text(entry.name):
                yield Fault(FaultKind.BAD_NAME, shown(path), "", "a file's name is text that can be printed")
            elif stat.S_ISDIR(found.st_mode):
                yield from _inner(Path(entry.path), path, depth)
            elif stat.S_ISREG(found.st_mode):
                yield Entry(path, found.st_size, identity(found))
            else:
                kind = stat.filemode(found.st_mode)
                rule = "only regular files and folders belong here: no links, pipes, sockets or devices"
                yield Fault(FaultKind.NOT_A_FILE, path, f"mode {kind}", rule)


def _inner(folder: Path, path: str, depth: int) -> Iterator[Entry | Fault]:
    try:
        yield from _walk(folder, f"{path}/", depth + 1)
    except PermissionError as error:
        yield Fault(FaultKind.UNREADABLE, path, "", f"can't be looked at: {error.strerror}")


def identity(found: os.stat_result) -> Identity:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def open_plain(path: Path) -> int:
    """A descriptor of a regular file; never follows a link, never waits for a pipe. `OSError` otherwise."""
    opened = os.open(path, _PLAIN)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return opened


def read_plain(path: Path, limit: int) -> bytes:
    """All of a small file; `OSError` when it is larger than `limit` or not a regular one."""
    with open(open_plain(path), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"is larger than {limit:,} bytes", str(path))
    return data


def _is_text(name: str) -> bool:
    return name.isprintable() and not any(0xDC80 <= ord(letter) <= 0xDCFF for letter in name)


def _too_much(folder: Path, value: str) -> BadSubmission:
    rule = "that is no submission; look for what wrote it, and keep only the model's own files"
    return BadSubmission(str(folder), [Fault(FaultKind.TOO_MUCH, str(folder), value, rule)])
