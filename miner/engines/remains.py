"""Processes of a run that nobody looks after any more, found by a mark in their environment.

The wrapper ends everything that it started; this is for when it was killed itself, or when Docker died while
it started a container and does not know it now.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

#: The variable that every process of a run inherits.
MARK = "GOD_MINER_RUN"
GONE_S = 5.0


def mark(data_id: str, key: str) -> str:
    """The variable's value: nobody else's runs have it."""
    return f"{data_id}/{key}"


def marked(value: str) -> set[int]:
    wanted = f"{MARK}={value}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
    return found


def end(value: str) -> int:
    """Kill them until there are none: how many there were at first."""
    first = left = marked(value)
    ends = time.monotonic() + GONE_S
    while left and time.monotonic() < ends:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        left = marked(value)
    return len(first)
