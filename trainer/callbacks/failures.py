"""What went wrong in a training process, in the words of the run files, left where the wrapper finds it.

One rank that fails while the others wait for it would hang them all, so it says why and ends at once; the
launcher then takes the others down.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from core.progress import OomEvent
from core.run_files import EXIT_OF, ExitCode, RunEnd
from trainer.callbacks.report import Report
from trainer.errors import TrainingError
from trainer.sheet import Failure, Sheet, write_whole

#: How torch, CUDA's libraries, vLLM and the allocators say that there is no memory left.
_OOM = re.compile(
    r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_(ALLOC_FAILED|NOT_SUPPORTED.*memory)"
    r"|can't allocate memory|NCCL.*memory allocation|No available memory for the cache blocks",
    re.IGNORECASE,
)
_DISK = re.compile(
    r"No space left on device|disk quota exceeded|os error 28|PytorchStreamWriter failed writing",
    re.IGNORECASE,
)
_DATA = re.compile(r"num_samples=0|num_samples should be a positive integer|Dataset is empty", re.IGNORECASE)
#: How gloo, NCCL and the store say that another rank does not answer.
_GONE = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Timed out waiting|Socket Timeout|Broken pipe"
    r"|remote process (has )?exited|NCCL communicator was aborted|recvBytes|watchdog got stuck",
    re.IGNORECASE,
)
#: Longest that a message may be in a file that people read.
_MOST_TEXT = 2000


class NotANumber(TrainingError):
    """Loss, gradients or weights have become NaN or infinite."""

    code = "nan"
    end = RunEnd.NAN


def failure_of(error: BaseException, moment: str) -> Failure:
    """The end that this exception means. `moment` is what was being done."""
    end = end_of(error)
    text = f"{type(error).__name__}: {error}"
    gone = end is RunEnd.CRASHED and isinstance(error, RuntimeError) and _GONE.search(text) is not None
    if gone:
        text = f"another process of this training is gone or silent: {text}"
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    return Failure(
        end=end,
        moment=moment if end is RunEnd.OOM else None,
        detail=text[:_MOST_TEXT],
        traceback="".join(lines)[-20_000:],
        at=time.time(),
        consequence=gone,
    )


def end_of(error: BaseException) -> RunEnd:
    """The first that is known of an error and of what caused it."""
    for one in _chain(error):
        if isinstance(one, TrainingError):
            return one.end
        if is_oom(one):
            return RunEnd.OOM
        if isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT):
            return RunEnd.DISK_FULL
        if is_disk_full(str(one)):
            return RunEnd.DISK_FULL
        # What nests too deep came with the task, and does so in every attempt.
        if isinstance(one, RecursionError) or _DATA.search(str(one)):
            return RunEnd.BAD_DATA
    return RunEnd.CRASHED


def _chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    now: BaseException | None = error
    while now is not None and now not in found and len(found) < 10:
        found.append(now)
        now = now.__cause__ or now.__context__
    return found


def is_disk_full(text: str) -> bool:
    return _DISK.search(text) is not None


def is_oom(error: BaseException) -> bool:
    """GPU memory, or a host allocation that torch could not make."""
    if isinstance(error, MemoryError):
        return True
    return type(error).__name__ == "OutOfMemoryError" or (
        isinstance(error, RuntimeError | ValueError) and _OOM.search(str(error)) is not None
    )


Moment = Callable[[], str]


def catch_all(sheet: Sheet, rank: int, moment: Moment) -> None:
    """From here on whatever ends this process unhandled is written down first."""

    def caught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt | SystemExit):
            sys.__excepthook__(kind, error, trace)
            return
        sys.__excepthook__(kind, error, trace)
        give_up(sheet, rank, failure_of(error, moment()))

    sys.excepthook = caught


def give_up(sheet: Sheet, rank: int, failure: Failure) -> NoReturn:
    """Say why, and end without the interpreter's goodbye: destructors of process groups wait for the
    others."""
    with contextlib.suppress(OSError):  # a full disk is told by the log, and must not keep this process
        write_whole(sheet.failure_path(rank), failure)
    if failure.end is RunEnd.OOM:
        text = f"rank {rank}: {failure.detail}"[:_MOST_TEXT]
        # Any rank may be the one that ran out; the lines of one file do not mix.
        Report(Path(sheet.run.progress_path)).say(
            OomEvent(t=time.time(), moment=failure.moment or "train", text=text)
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(EXIT_OF.get(failure.end, ExitCode.CRASHED)))
