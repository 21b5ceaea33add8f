"""A child and everything it starts, wherever that hides.

Launchers put their workers into sessions of their own, so signals to a group do not reach them. This process
makes itself the foster parent of every orphan below it (a Linux subreaper): then the tree of descendants is
complete, and killing it leaves nobody behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
#: Lines of the engine's output that are kept for the report of a crash.
TAIL_LINES = 60
#: No line of an engine says more than this.
LONGEST_LINE = 20_000
#: A process that was killed is gone within this, unless it hangs in the kernel.
KILL_S = 10.0
#: As a container sees its own: cgroup v2, then v1.
OOM_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


def adopt_orphans() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int | None = None) -> list[int]:
    """Every process below this one, children before grandchildren; zombies left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], deque([os.getpid() if pid is None else pid])
    while queue:
        below = children.get(queue.popleft(), [])
        found += below
        queue.extend(below)
    return found


def _parent(entry: Path) -> int | None:
    try:
        fields = (entry / "stat").read_text("ascii", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[1])


def kill_descendants(own: int | None = None) -> None:
    """All of them, and those that they start meanwhile; orphans' exit codes are collected, `own`'s is not."""
    until = time.monotonic() + KILL_S
    while time.monotonic() < until and (left := descendants()):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    reap(own)


def reap(own: int | None = None) -> None:
    """Orphans that ended under our care; the child itself is left to whoever waits for it."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == own:
            continue
        with contextlib.suppress(ChildProcessError, OSError):
            if (entry / "stat").read_text("ascii", "replace").rpartition(")")[2].split()[0] == "Z":
                os.waitpid(int(entry.name), os.WNOHANG)


def memory_kills() -> int:
    """How often the kernel killed something of this control group for memory; 0 where it cannot be read."""
    found = 0
    for path in OOM_FILES:
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            found += sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    return found


def dump_stacks() -> int:
    """SIGUSR1 to every descendant that has a handler for it; the others would die of it. How many have."""
    asked = [pid for pid in descendants() if _catches(pid, signal.SIGUSR1)]
    for pid in asked:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR1)
    return len(asked)


def _catches(pid: int, number: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text("ascii", "replace")
    except OSError:
        return False
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


class Child:
    """A program in a session of its own. Its output goes where ours goes, and the end of it is remembered."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        heard: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`heard` is told every line, those of a progress bar too; in a thread of its own."""
        self._heard = heard
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = subprocess.Popen(
            list(command),
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._pass_on, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def close(self) -> int:
        """Kill whatever is left of it, and read its last words."""
        kill_descendants(self.pid)
        code = self._process.wait()
        self._reader.join(timeout=KILL_S)
        return code

    def _pass_on(self, stream: IO[bytes]) -> None:
        rest = b""
        while piece := os.read(stream.fileno(), 1 << 16):
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()
            # A progress bar rewrites its line with a return and no new one.
            *lines, rest = (rest + piece).replace(b"\r", b"\n").split(b"\n")
            for line in lines:
                self._take(line)
            rest = rest[-LONGEST_LINE:]
        self._take(rest)

    def _take(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").strip()[:LONGEST_LINE]
        if text:
            self.tail.append(text[:500])
            try:
                self._heard(text)
            except Exception:
                # Without a reader the engine would wait for ever to be heard.
                log.exception("a line of the engine was not understood: %s", text[:200])
