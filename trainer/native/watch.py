"""A process that stands still ends, with its stacks in the log and a reason: else it would hold its GPU, and
the others' with it, until the deadline."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

_HERE = str(Path(__file__).parents[1])
#: Looked at so often, or a quarter of the limit.
_LOOK_S = 5.0


class Watch:
    """`alive` is to be called whenever something was done. Use as a context."""

    def __init__(self, limit_s: float, hung: Callable[[str], None]) -> None:
        """`hung` is told the reason, from a thread of its own; what it does should be the end."""
        self._limit, self._hung = limit_s, hung
        self._last = time.monotonic()
        self._over = threading.Event()
        self._main = threading.current_thread().ident or 0
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self.alive()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def alive(self) -> None:
        self._last = time.monotonic()

    def _look(self) -> None:
        while not self._over.wait(min(_LOOK_S, self._limit / 4)):
            still = time.monotonic() - self._last
            if still > self._limit:
                where = place_of(sys._current_frames().get(self._main))
                faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
                _dump_collectives()
                self._hung(f"nothing done for {still:.0f} s, last in {where}; all stacks are in the log")
                return


def place_of(frame: FrameType | None) -> str:
    """Where in our own code a thread is, and whether it waits for other processes."""
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
    """NCCL's flight recorder, where this torch has one: the last collectives, and which were not joined."""
    import torch

    record = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_nccl_trace_json", None)
    if record is not None and torch.cuda.is_available():
        sys.stderr.write(f"the last collectives: {record()!r}\n"[:20_000])
