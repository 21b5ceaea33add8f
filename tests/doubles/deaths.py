"""Death at a named step instead of a random instant: before the nth thing that another process could see."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

#: Python's audit events, which are raised before the thing is done.
STEPS = {
    "os.rename",
    "os.link",
    "os.symlink",
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "subprocess.Popen",
    "os.posix_spawn",
    "http.client.connect",
    "http.client.send",
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def die_before(step: int) -> None:
    """Kill this process before it takes that many steps, counted from now."""
    left = step

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in STEPS or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
