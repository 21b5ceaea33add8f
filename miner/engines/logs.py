"""The log of a run, read piece by piece while it grows and is turned over."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from core.run_files import LOG_FILE
from miner.engines.untrusted import opened

#: What one look reads at most.
PIECE = 1 << 18


class Place(NamedTuple):
    """Where reading goes on: in which file of that name, and from which byte."""

    inode: int = 0
    offset: int = 0


START = Place()


def read_log(run_dir: Path, place: Place = START, limit: int = PIECE) -> tuple[bytes, Place]:
    """What is new since `place`, and where to go on. When the log was turned over, the new file from its
    beginning; nothing while there is no log."""
    try:
        with opened(run_dir, LOG_FILE) as file:
            found = os.fstat(file)
            offset = place.offset if place.inode == found.st_ino and place.offset <= found.st_size else 0
            data = os.pread(file, limit, offset)
    except OSError:
        return b"", place
    return data, Place(found.st_ino, offset + len(data))


def log_tail(run_dir: Path, size: int = 4096) -> str:
    """The last lines, for a message to people."""
    try:
        with opened(run_dir, LOG_FILE) as file:
            written = os.fstat(file).st_size
            start = max(0, written - size)
            # Memory for as much as is asked for is taken at once, however little there is.
            text = os.pread(file, min(size, written), start).decode(errors="replace")
    except OSError:
        return ""
    return text.partition("\n")[2] if start and "\n" in text else text
