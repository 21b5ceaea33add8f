"""Find the processes of a run: each has a mark in its environment, with the data directory's id.

The wrapper ends all that it started; the mark finds what is left when the wrapper itself was killed, or when
Docker died while it started a container.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from core.system.wrapper import kill_until_gone

#: The variable that every process of a run inherits.
MARK_VARIABLE = "GOD_MINER_RUN"
GONE_S = 5.0


def run_mark(data_id: str, key: str) -> str:
    """The variable's value, which no other run has."""
    return f"{data_id}/{key}"


def marked_processes(value: str) -> set[int]:
    wanted = f"{MARK_VARIABLE}={value}".encode()
    pids = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    pids.add(int(entry.name))
    return pids


def kill_marked(value: str) -> int:
    """Kill every process with this mark, until none is left; return how many there were at first."""
    return kill_until_gone(lambda: marked_processes(value), GONE_S)
