"""What watches over a training process from within: a thread, and signals that the engine leaves alone."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from pathlib import Path

#: A dead wrapper is noticed within this.
WRAPPER_S = 2.0


def dump_stacks_on_request() -> None:
    """SIGUSR1: where every thread is, to the log. Needs no cooperation of a process that hangs."""
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def stop_on_term(stop: Path) -> None:
    """Without our wrapper a launcher hands SIGTERM on to every rank, and kills half a minute later."""

    def asked(number: int, frame: object) -> None:
        with contextlib.suppress(OSError):
            stop.touch()

    signal.signal(signal.SIGTERM, asked)


def end_with(wrapper_pid: int | None) -> None:
    """End when the wrapper is gone: launchers put workers into sessions of their own, so no group kill
    reaches them, and an orphan holds its GPU for ever."""
    if wrapper_pid is None:
        return
    began = _started(wrapper_pid)
    thread = threading.Thread(target=_watch, args=(wrapper_pid, began), name="wrapper-watch", daemon=True)
    thread.start()


def _watch(pid: int, began: str | None) -> None:
    while began is not None and _started(pid) == began:
        time.sleep(WRAPPER_S)
    os.write(2, b"the wrapper is gone: this training ends\n")
    os._exit(1)


def _started(pid: int) -> str | None:
    """When a living process started, in ticks since boot: with the pid it names one process for ever."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


class StopFile:
    """A request to stop, seen at most so often: network file systems are slow to ask."""

    def __init__(self, path: Path, every_s: float = 1.0) -> None:
        self._path, self._every = path, every_s
        self._next, self._seen = 0.0, False

    @property
    def asked(self) -> bool:
        if not self._seen and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            self._seen = self._path.exists()
        return self._seen
