"""What an exception means, and that it is written down before the process ends."""

# Once: it needs nothing of the training stack.

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.runs.progress import OomEvent, parse_events
from core.runs.run_files import RunEnd, TrainerExitCode
from tests.doubles.each import each
from tests.trainer.run_specs import run_spec
from trainer.errors import BadData
from trainer.handoff import LaunchSpec, PreparedRows, TrainingFailure, read_record
from trainer.session.failures import NotANumber, failure_of

pytestmark = pytest.mark.process


ROOT = Path(__file__).parents[3]


class OutOfMemoryError(RuntimeError):
    """torch's own has this name; it is a RuntimeError too."""


@each(
    ("error", "end"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), RunEnd.OOM),
        (RuntimeError("CUDA error: out of memory"), RunEnd.OOM),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), RunEnd.OOM),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: cannot allocate memory: you tried"), RunEnd.OOM),
        (MemoryError(), RunEnd.OOM),
        (OSError(errno.ENOSPC, "No space left on device"), RunEnd.DISK_FULL),
        (RuntimeError("safetensors: I/O error: No space left on device (os error 28)"), RunEnd.DISK_FULL),
        (
            ValueError("num_samples should be a positive integer value, but got num_samples=0"),
            RunEnd.BAD_DATA,
        ),
        (BadData("no rows"), RunEnd.BAD_DATA),
        (RecursionError("maximum recursion depth exceeded"), RunEnd.BAD_DATA),
        (NotANumber("nan"), RunEnd.NAN),
        (KeyError("conversations"), RunEnd.CRASHED),
        (RuntimeError("expected scalar type Float but found BFloat16"), RunEnd.CRASHED),
    ],
)
def test_an_exception_has_the_end_that_it_means(error: Exception, end: RunEnd) -> None:
    failure = failure_of(error, "train")
    assert failure.end is end
    assert type(error).__name__ in failure.detail
    assert failure.moment == ("train" if end is RunEnd.OOM else None)


def test_the_cause_of_an_exception_counts() -> None:
    error = RuntimeError("dataset preparation failed")
    error.__cause__ = BadData("all rows too long")
    assert failure_of(error, "load").end is RunEnd.BAD_DATA


CRASHING = """
import sys
from trainer.session.failures import record_uncaught
from trainer.handoff import LaunchSpec

record_uncaught(LaunchSpec.read(), 3, lambda: "generation")
raise eval(sys.argv[1])
"""


def launch_spec(folder: Path) -> LaunchSpec:
    run = run_spec(folder)
    prepared = PreparedRows(train_path="t", train_rows=1, eval_rows=0)
    return LaunchSpec(run=run, plan_path="p", launch_dir=str(folder), prepared=prepared)


@pytest.mark.parametrize(
    ("raised", "end", "code"),
    [
        ("RuntimeError('CUDA out of memory')", RunEnd.OOM, TrainerExitCode.OOM),
        ("ZeroDivisionError()", RunEnd.CRASHED, TrainerExitCode.CRASHED),
    ],
)
def test_a_rank_that_fails_records_why_and_ends_at_once(
    tmp_path: Path, raised: str, end: RunEnd, code: TrainerExitCode
) -> None:
    spec = launch_spec(tmp_path)
    environment = {**os.environ, "GOD_MINER_LAUNCH_SPEC": str(spec.write()), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", CRASHING, raised],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == code
    assert "Traceback" in done.stderr
    failure = read_record(TrainingFailure, spec.failure_path(3))
    assert failure is not None
    assert failure.end is end
    assert "line" in failure.traceback
    progress = tmp_path / "progress.jsonl"
    events = [line.event for line in parse_events(progress.read_bytes())] if progress.exists() else []
    if end is RunEnd.OOM:
        assert isinstance(events[0], OomEvent)
        assert events[0].moment == "generation"
    else:
        assert events == []


@pytest.mark.parametrize(
    "text",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711",
        "Timed out waiting 20000ms for recv operation to complete",
        "NCCL error: remote process exited or there was a network error",
    ],
)
def test_a_rank_that_lost_the_others_is_a_consequence(text: str) -> None:
    failure = failure_of(RuntimeError(text), "train")
    assert failure.consequence
    assert failure.detail.startswith("another process of this training is gone or silent")
    assert not failure_of(ValueError(text), "train").consequence
