"""What of the world outside its process a test reaches for: what a fast one must not.

Python's own audit events say it, whoever asks; nothing is replaced.
"""

from __future__ import annotations

import socket
import sys
import traceback
from pathlib import Path
from typing import Any

TESTS = str(Path(__file__).parents[1])
PROCESSES = {
    "subprocess.Popen",
    "os.posix_spawn",
    "os.fork",
    "os.forkpty",
    "os.exec",
    "os.system",
    "os.spawn",
}
FAMILIES = (socket.AF_INET, socket.AF_INET6)
#: Not `socket.__new__` alone: an event loop makes a pair of its own, and never connects or binds it.
#: A look whether a port is free is nothing that a test could wait for.
PORTS = str(Path(TESTS).parent / "miner" / "jobs" / "launch.py")
SOCKETS = {"socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto"}

#: What was reached for since `forget`.
reached: list[str] = []
_began = False


def watch() -> None:
    """Begin; an audit hook is for the life of the process."""
    global _began
    if not _began:
        _began = True
        sys.addaudithook(_heard)


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "import":
        if arguments[0] == "torch":
            _note("imports torch")
    elif event in PROCESSES:
        _note("starts a process" if event != "subprocess.Popen" else f"starts {arguments[0]}")
    elif event in SOCKETS or (event == "socket.__new__" and arguments[1] in FAMILIES):
        _note("opens a socket")


def _note(what: str) -> None:
    stack = traceback.extract_stack()[:-2]
    if any(frame.filename == PORTS for frame in stack):
        return
    frames = [frame for frame in stack if frame.filename.startswith(TESTS)]
    where = [
        f" ({Path(frame.filename).name}:{frame.lineno})" for frame in frames if frame.filename != __file__
    ]
    reached.append(f"{what}{where[-1] if where else ''}")


def forget() -> None:
    reached.clear()
