"""How a launch went, from what it left behind."""

from __future__ import annotations

from typing import Any

import pytest

from core.runs.run_files import RunEnd
from tests.doubles.each import each
from trainer.handoff import TrainingFailure, TrainingOutcome
from trainer.runner.supervise import LaunchResult, ProcessEnd, Termination, launch_result


def result_of(
    *failures: TrainingFailure | None,
    code: int = 1,
    ended: Termination | None = None,
    tail: tuple[str, ...] = (),
    oom_kills: int = 0,
    outcome: TrainingOutcome | None = None,
    marked: bool = True,
) -> LaunchResult:
    return launch_result(ProcessEnd(code, ended, tail, oom_kills), outcome, failures, marked)


def failure(end: RunEnd, at: float = 0.0, **changes: Any) -> TrainingFailure:
    return TrainingFailure(end=end, at=at, detail=f"because {end}", **changes)


CRASHED = failure(RunEnd.CRASHED)
LOST = failure(RunEnd.CRASHED, 1, consequence=True)
KILLED_RANK = "exitcode  : -9 (pid: 8)  (SIGKILL)"
SUMMARY = ("Failures:", "exitcode  : 1 (pid: 7)", "Root Cause (first observed failure):", "[0]:")


def test_the_trainings_own_outcome_counts_first() -> None:
    outcome = TrainingOutcome(end=RunEnd.FINISHED, detail="all done", steps=7)
    attempt = result_of(CRASHED, code=0, outcome=outcome)
    assert (attempt.end, attempt.outcome) == (RunEnd.FINISHED, outcome)


def test_memory_is_the_cause_before_all_with_its_moment() -> None:
    memory = result_of(failure(RunEnd.CRASHED, 1), failure(RunEnd.OOM, 9, moment="evaluation"))
    assert (memory.end, memory.moment) == (RunEnd.OOM, "evaluation")


def test_what_the_runner_did_counts_where_the_training_has_no_outcome() -> None:
    attempt = result_of(None, code=-9, ended=Termination(RunEnd.CLOCK, "time"))
    assert (attempt.end, attempt.detail) == (RunEnd.CLOCK, "time")


@pytest.mark.parametrize(
    ("failures", "ended", "end"),
    [
        ((failure(RunEnd.CRASHED, 5), None, failure(RunEnd.BAD_DATA, 3)), {}, RunEnd.BAD_DATA),
        ((failure(RunEnd.OOM),), {"code": -9, "ended": Termination(RunEnd.HUNG, "quiet")}, RunEnd.OOM),
        ((CRASHED,), {"tail": (*SUMMARY, KILLED_RANK)}, RunEnd.KILLED),
        ((CRASHED,), {"tail": (KILLED_RANK, *SUMMARY)}, RunEnd.KILLED),
        ((CRASHED,), {"tail": (*SUMMARY, "exitcode  : 1 (pid: 8)")}, RunEnd.CRASHED),
        ((failure(RunEnd.BAD_DATA),), {"tail": (*SUMMARY, KILLED_RANK)}, RunEnd.BAD_DATA),
        ((LOST,), {"tail": (KILLED_RANK,)}, RunEnd.KILLED),
        ((LOST, failure(RunEnd.NAN, 5)), {}, RunEnd.NAN),
        ((LOST,), {}, RunEnd.CRASHED),
    ],
    ids=[
        "the first failure",
        "others that hang after it",
        "a rank that was killed",
        "a rank that was killed, seen first",
        "none that was killed",
        "a rank's own word",
        "a rank that only lost one that was killed",
        "a rank that only lost one that failed",
        "a rank that only lost others",
    ],
)
def test_the_cause_counts_and_not_what_follows_from_it(
    failures: tuple[TrainingFailure | None, ...], ended: dict[str, Any], end: RunEnd
) -> None:
    assert result_of(*failures, **ended).end is end


def test_an_engine_that_exits_without_our_plugin_has_failed_even_with_zero() -> None:
    attempt = result_of(None, code=0, tail=("some", "last words"), marked=False)
    assert attempt.end is RunEnd.CRASHED
    assert "never loaded our plugin" in attempt.detail
    assert "last words" in attempt.detail


@each("how", [{"code": -9}, {"tail": (KILLED_RANK,)}])
def test_a_kill_is_the_hosts_memory_where_the_kernel_counted_one_and_else_just_a_kill(
    how: dict[str, Any],
) -> None:
    assert result_of(None, **how).end is RunEnd.KILLED
    assert result_of(None, **how, oom_kills=1).end is RunEnd.OOM


@each(
    "line",
    [
        "OSError: [Errno 28] No space left on device: '/run/x'",
        "SafetensorError: Error while serializing: I/O error: (os error 28)",
        "RuntimeError: PytorchStreamWriter failed writing file data/3: file write failed",
        "  exitcode  : 32 (pid: 77)",
    ],
)
def test_a_full_disk_is_named_although_its_record_was_lost_with_it(line: str) -> None:
    for failures, marked in (((None,), True), ((CRASHED,), True), ((None,), False)):
        assert result_of(*failures, tail=(line,), marked=marked).end is RunEnd.DISK_FULL


def test_a_silent_end_is_a_crash_with_its_code() -> None:
    attempt = result_of(None, code=3)
    assert attempt.end is RunEnd.CRASHED
    assert "ended with 3 without a word" in attempt.detail
