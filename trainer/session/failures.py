"""Failures of a training process, as records that the runner reads.

One rank that fails while the others wait for it would hang them all, so it records why and ends at once; the
launcher then ends the others.
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

from core.runs.progress import OomEvent
from core.runs.run_files import EXIT_OF, RunEnd, TrainerExitCode
from trainer.errors import TrainingError
from trainer.handoff import LaunchSpec, TrainingFailure, write_record
from trainer.session.progress_log import ProgressLog

#: How torch, CUDA's libraries, vLLM and the allocators report that memory ran out.
_OOM = re.compile(
    r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_(ALLOC_FAILED|NOT_SUPPORTED.*memory)"
    r"|cannot allocate memory|NCCL.*memory allocation|No available memory for the cache blocks",
    re.IGNORECASE,
)
_DISK = re.compile(
    r"No space left on device|disk quota exceeded|os error 28|PytorchStreamWriter failed writing",
    re.IGNORECASE,
)
_DATA = re.compile(r"num_samples=0|num_samples should be a positive integer|Dataset is empty", re.IGNORECASE)
#: How gloo, NCCL and the store report that another rank does not answer.
_PEER_LOST = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Timed out waiting|Socket Timeout|Broken pipe"
    r"|remote process (has )?exited|NCCL communicator was aborted|recvBytes|watchdog got stuck",
    re.IGNORECASE,
)
#: Longest that a message may be in a file that people read.
_MAX_TEXT = 2000


class NotANumber(TrainingError):
    """Loss, gradients or weights have become NaN or infinite."""

    code = "nan"
    end = RunEnd.NAN


def one_line(error: BaseException) -> str:
    """The message of a record; a traceback is in the log."""
    text = str(error) if isinstance(error, TrainingError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:_MAX_TEXT]


def failure_of(error: BaseException, phase: str) -> TrainingFailure:
    """The end that this exception means. `phase` is what was being done."""
    end = end_of(error)
    text = f"{type(error).__name__}: {error}"
    lost_peer = (
        end is RunEnd.CRASHED and isinstance(error, RuntimeError) and _PEER_LOST.search(text) is not None
    )
    if lost_peer:
        text = f"another process of this training is gone or silent: {text}"
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    return TrainingFailure(
        end=end,
        moment=phase if end is RunEnd.OOM else None,
        detail=text[:_MAX_TEXT],
        traceback="".join(lines)[-20_000:],
        at=time.time(),
        consequence=lost_peer,
    )


def end_of(error: BaseException) -> RunEnd:
    """The end of the first known error among this one and its causes."""
    for cause in _chain(error):
        if isinstance(cause, TrainingError):
            return cause.end
        if is_oom(cause):
            return RunEnd.OOM
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return RunEnd.DISK_FULL
        if is_disk_full(str(cause)):
            return RunEnd.DISK_FULL
        # What nests too deep came with the task, and does so in every attempt.
        if isinstance(cause, RecursionError) or _DATA.search(str(cause)):
            return RunEnd.BAD_DATA
    return RunEnd.CRASHED


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain and len(chain) < 10:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def is_disk_full(text: str) -> bool:
    return _DISK.search(text) is not None


def is_oom(error: BaseException) -> bool:
    """Return True if GPU memory ran out, or a host allocation of torch failed."""
    if isinstance(error, MemoryError):
        return True
    return type(error).__name__ == "OutOfMemoryError" or (
        isinstance(error, RuntimeError | ValueError) and _OOM.search(str(error)) is not None
    )


CurrentPhase = Callable[[], str]


def record_uncaught(spec: LaunchSpec, rank: int, current_phase: CurrentPhase) -> None:
    """From now on an unhandled exception is recorded before it ends this process."""

    def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt | SystemExit):
            sys.__excepthook__(kind, error, trace)
            return
        sys.__excepthook__(kind, error, trace)
        exit_with_failure(spec, rank, failure_of(error, current_phase()))

    sys.excepthook = on_error


def exit_with_failure(spec: LaunchSpec, rank: int, failure: TrainingFailure) -> NoReturn:
    """Record the failure and end without the interpreter's shutdown: destructors of process groups wait for
    the others."""
    with contextlib.suppress(OSError):  # a full disk is in the log, and must not keep this process
        write_record(spec.failure_path(rank), failure)
    if failure.end is RunEnd.OOM:
        text = f"rank {rank}: {failure.detail}"[:_MAX_TEXT]
        # Any rank may be the one that ran out; the lines of one file do not mix.
        ProgressLog(Path(spec.run.progress_path)).write(
            OomEvent(t=time.time(), moment=failure.moment or "train", text=text)
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(EXIT_OF.get(failure.end, TrainerExitCode.CRASHED)))
