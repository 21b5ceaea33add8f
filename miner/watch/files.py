"""Pieces of files in an attempt's folder, where hostile code may write too: see `miner.engines.untrusted`."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from miner.engines.untrusted import opened, put, read_small

log = logging.getLogger(__name__)


def read(path: Path, limit: int) -> bytes | None:
    """A small file whole. None for one that is not there, is no plain file, or is larger than `limit`."""
    return read_small(path.parent, path.name, limit)


def read_from(path: Path, offset: int, limit: int) -> tuple[bytes, int]:
    """At most `limit` bytes from `offset` on, and the file's size now (0 where there is none)."""
    try:
        with opened(path.parent, path.name) as handle:
            size = os.fstat(handle).st_size
            return (os.pread(handle, limit, offset) if size > offset else b""), size
    except OSError:
        return b"", 0


def touch(path: Path) -> bool:
    """Make an empty file. False where that can't be done, as on a full disk or in a folder that is gone: no
    reason to leave undone what follows it."""
    try:
        put(path.parent, path.name, b"")
    except OSError as error:
        log.warning("%s can't be made: %s", path, error.strerror)
        return False
    return True
