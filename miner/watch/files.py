"""Reading and writing files in a folder that hostile code can write to as well.

A training may hold reward functions from outside, and they may put a link, a pipe or a device in the place of
any file of their attempt. So: regular files only, never through a link, never more than asked for, and
never waiting.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, int] | None]:
    """The descriptor and the size; None for what is not there or is no regular file."""
    handle = _open(path)
    try:
        yield handle
    finally:
        if handle is not None:
            os.close(handle[0])


def _open(path: Path) -> tuple[int, int] | None:
    try:
        handle = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EACCES):
            return None
        raise
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        return None
    return handle, status.st_size


def read(path: Path, limit: int) -> bytes | None:
    """A small file whole. None for one that is not there, is none, or is larger than `limit`."""
    with opened(path) as found:
        if found is None or found[1] > limit:
            return None
        data = os.pread(found[0], limit + 1, 0)
        return data if len(data) <= limit else None


def read_from(path: Path, offset: int, limit: int) -> tuple[bytes, int]:
    """At most `limit` bytes from `offset` on, and the file's size now (0 where there is none)."""
    with opened(path) as found:
        if found is None:
            return b"", 0
        handle, size = found
        return os.pread(handle, limit, offset) if size > offset else b"", size


def tail(path: Path, limit: int) -> bytes:
    """The last bytes of a file."""
    with opened(path) as found:
        if found is None:
            return b""
        handle, size = found
        return os.pread(handle, limit, max(size - limit, 0))


def touch(path: Path) -> None:
    """Make an empty file, unless something of that name is there."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        os.close(os.open(path, flags, 0o644))
    except FileExistsError:
        return
