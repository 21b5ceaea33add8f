"""Reading files that hostile code could write: a run folder belongs to the training, not to us.

A name there may be a link to the wallet, a pipe that nobody ever writes into, or a folder put in place of
another. So: no link is followed from the job's folder on, only plain files are read, and never more than was
asked for.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path


def read_small(run_dir: Path, name: str, limit: int = 1 << 16) -> bytes | None:
    """A small file of a run folder; None when it is not there, not a plain file, or too large."""
    with contextlib.suppress(OSError), opened(run_dir, name) as file:
        if os.fstat(file).st_size <= limit:
            return os.pread(file, limit, 0)
    return None


@contextlib.contextmanager
def opened(run_dir: Path, name: str) -> Iterator[int]:
    """A plain file of a run folder, open for reading; `OSError` when it is anything else."""
    with _folder(run_dir) as folder:
        # Without O_NONBLOCK a pipe would hold us here until somebody writes into it.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{run_dir / name} is not a plain file")
        yield file
    finally:
        os.close(file)


def put(run_dir: Path, name: str, content: bytes) -> None:
    """Write a file into a run folder, whole or not at all; a link in its place is replaced, not followed."""
    part = f".{name}.put"
    with _folder(run_dir) as folder:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(part, flags, 0o644, dir_fd=folder)
        try:
            os.write(file, content)
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)


@contextlib.contextmanager
def _folder(run_dir: Path) -> Iterator[int]:
    """The run folder itself: the job's folder that holds it may be open to the training as well."""
    parent = os.open(run_dir.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = os.open(run_dir.name, flags, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        yield folder
    finally:
        os.close(folder)
