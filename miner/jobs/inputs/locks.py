"""Locks between processes that vanish with whoever holds them, however it ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: How often a taken lock is tried again.
AGAIN_SECONDS = 0.2


@contextmanager
def locked(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Held inside; while another holds it, `waiting` is called now and then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while not _taken(handle):
            if waiting is not None:
                waiting()
            time.sleep(AGAIN_SECONDS)
        yield
    finally:
        os.close(handle)


def is_free(path: Path) -> bool:
    """Whether nobody holds it at this moment."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        return _taken(handle)
    finally:
        os.close(handle)


def _taken(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
