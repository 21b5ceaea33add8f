"""Guards inside a training process: end with the runner, stop on request, and exit when nothing happens.

A process that hangs would hold its GPU, and the other ranks' GPUs, until the deadline.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Self

from core.runs.run_files import RunEnd

#: A dead runner is noticed within this.
RUNNER_S = 2.0


def dump_stacks_on_request() -> None:
    """On SIGUSR1 write the stacks of all threads to the log. That needs no cooperation of a hanging
    process."""
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def stop_on_term(stop: Path) -> None:
    """On SIGTERM request a stop: without our runner a launcher sends it to every rank, and kills half a
    minute later."""

    def on_term(number: int, frame: object) -> None:
        with contextlib.suppress(OSError):
            stop.touch()

    signal.signal(signal.SIGTERM, on_term)


def exit_with_runner(runner_pid: int | None) -> None:
    """End when the runner is gone: launchers put workers into sessions of their own, so no group kill
    reaches them, and an orphan holds its GPU for ever."""
    if runner_pid is None:
        return
    began = _start_ticks(runner_pid)
    thread = threading.Thread(
        target=_wait_for_runner, args=(runner_pid, began), name="runner-watch", daemon=True
    )
    thread.start()


def _wait_for_runner(pid: int, began: str | None) -> None:
    while began is not None and _start_ticks(pid) == began:
        time.sleep(RUNNER_S)
    os.write(2, b"the runner is gone: this training ends\n")
    os._exit(1)


def _start_ticks(pid: int) -> str | None:
    """When a living process started, in ticks since boot: with the pid it names one process for ever."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


class EndsInTime:
    """Ends this process if it does not do so itself: libraries that load and encode look at no clock. Use as
    a context."""

    def __init__(
        self, reason: Callable[[], RunEnd | None], end: Callable[[RunEnd], None], patience_s: float = 5.0
    ) -> None:
        """`end` gets the reason, in a thread of its own, once there has been one for `patience_s`."""
        self._reason, self._end, self._patience = reason, end, patience_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="end", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while (reason := self._reason()) is None:
            if self._over.wait(min(0.5, self._patience)):
                return
        if not self._over.wait(self._patience):
            self._end(reason)


class StopFile:
    """A request to stop, checked at most every `every_s`: network file systems are slow."""

    def __init__(self, path: Path, every_s: float = 1.0) -> None:
        self._path, self._every = path, every_s
        self._next, self._seen = 0.0, False

    @property
    def requested(self) -> bool:
        if not self._seen and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            self._seen = self._path.exists()
        return self._seen


_HERE = str(Path(__file__).parents[1])
#: Seconds between two checks, or a quarter of the limit.
_CHECK_EVERY_S = 5.0


class HangWatchdog:
    """Call `heartbeat` whenever something was done. Use as a context."""

    def __init__(self, limit_s: float, on_hang: Callable[[str], None]) -> None:
        """`on_hang` gets the reason, in a thread of its own; it should end the process."""
        self._limit, self._on_hang = limit_s, on_hang
        self._last = time.monotonic()
        self._over = threading.Event()
        self._main = threading.current_thread().ident or 0
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> HangWatchdog:
        self.heartbeat()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def heartbeat(self) -> None:
        self._last = time.monotonic()

    def _run(self) -> None:
        while not self._over.wait(min(_CHECK_EVERY_S, self._limit / 4)):
            still = time.monotonic() - self._last
            if still > self._limit:
                where = own_frame(sys._current_frames().get(self._main))
                faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
                _dump_collectives()
                self._on_hang(f"nothing done for {still:.0f} s, last in {where}; all stacks are in the log")
                return


def own_frame(frame: FrameType | None) -> str:
    """Return the line of our own code where a thread is, and whether it waits for other processes."""
    waits = False
    while frame is not None:
        code = frame.f_code
        waits = waits or "torch/distributed" in code.co_filename
        if code.co_filename.startswith(_HERE) and "watch" not in code.co_filename:
            name = Path(code.co_filename).relative_to(Path(_HERE).parent)
            waiting = ", waiting for the other processes" if waits else ""
            return f"{name}:{frame.f_lineno} ({code.co_name}{waiting})"
        frame = frame.f_back
    return "foreign code"


def _dump_collectives() -> None:
    """Write NCCL's flight recorder to the log, where torch has one: the last collectives, and who is
    missing."""
    import torch

    record = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_nccl_trace_json", None)
    if record is not None and torch.cuda.is_available():
        sys.stderr.write(f"the last collectives: {record()!r}\n"[:20_000])
