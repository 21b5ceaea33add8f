"""Read and write files in directories that hostile code can write to.

A name there may be a link to the wallet, a pipe that nobody writes into, or a directory put in place of
another. So no link is followed below the job's directory, only plain files are read, and never more than
was asked for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)


def read_untrusted(path: Path, limit: int = 1 << 16) -> bytes | None:
    """Read a small file; None when it is missing, not a plain file, or larger than `limit`."""
    with contextlib.suppress(OSError), open_untrusted(path) as file:
        if os.fstat(file).st_size <= limit:
            return os.pread(file, limit, 0)
    return None


def read_untrusted_from(path: Path, offset: int, limit: int) -> tuple[bytes, int]:
    """Read at most `limit` bytes from `offset` on; return them and the file's size (0 if there is none)."""
    try:
        with open_untrusted(path) as file:
            size = os.fstat(file).st_size
            return (os.pread(file, limit, offset) if size > offset else b""), size
    except OSError:
        return b"", 0


@contextlib.contextmanager
def open_untrusted(path: Path) -> Iterator[int]:
    """Open a plain file for reading; `OSError` when it is anything else."""
    with _open_folder(path.parent) as folder:
        # Without O_NONBLOCK a pipe would block until somebody writes into it.
        file = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{path} is not a plain file")
        yield file
    finally:
        os.close(file)


def write_untrusted(path: Path, content: bytes) -> None:
    """Write a file atomically; a link in its place is replaced, not followed."""
    part = f".{path.name}.put"
    with _open_folder(path.parent) as folder:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(part, flags, 0o644, dir_fd=folder)
        try:
            os.write(file, content)
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)


def touch_untrusted(path: Path) -> bool:
    """Create an empty file; False when that fails, as on a full disk, which must not stop the caller."""
    try:
        write_untrusted(path, b"")
    except OSError as error:
        log.warning("%s cannot be created: %s", path, error.strerror)
        return False
    return True


@contextlib.contextmanager
def _open_folder(run_dir: Path) -> Iterator[int]:
    """Open the run directory itself: the training may be able to write to the job's directory as well."""
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
