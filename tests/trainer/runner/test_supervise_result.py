"""How a launch went, from what it left behind."""

from __future__ import annotations

from typing import Any

from core.runs.run_files import RunEnd
from trainer.handoff import TrainingFailure, TrainingOutcome
from trainer.runner.supervise import ProcessEnd, Termination, launch_result


def ended(code: int = 1, verdict: Termination | None = None, *tail: str, oom_kills: int = 0) -> ProcessEnd:
    return ProcessEnd(code, verdict, tail, oom_kills)


def failure(end: RunEnd, at: float = 0.0, **changes: Any) -> TrainingFailure:
    return TrainingFailure(end=end, at=at, detail=f"because {end}", **changes)


def test_the_trainings_own_outcome_counts_first() -> None:
    outcome = TrainingOutcome(end=RunEnd.FINISHED, detail="all done", steps=7)
    attempt = launch_result(ended(0), outcome, [failure(RunEnd.CRASHED)], marked=True)
    assert (attempt.end, attempt.outcome) == (RunEnd.FINISHED, outcome)


def test_the_first_failure_is_the_cause_and_memory_before_all() -> None:
    first = launch_result(
        ended(), None, [failure(RunEnd.CRASHED, 5), None, failure(RunEnd.BAD_DATA, 3)], marked=True
    )
    assert first.end is RunEnd.BAD_DATA
    memory = launch_result(
        ended(), None, [failure(RunEnd.CRASHED, 1), failure(RunEnd.OOM, 9, moment="evaluation")], marked=True
    )
    assert (memory.end, memory.moment) == (RunEnd.OOM, "evaluation")


def test_what_the_runner_did_counts_where_the_training_has_no_outcome() -> None:
    attempt = launch_result(ended(-9, Termination(RunEnd.CLOCK, "time")), None, [None], marked=True)
    assert (attempt.end, attempt.detail) == (RunEnd.CLOCK, "time")


def test_ranks_that_hang_after_one_failed_are_its_consequence() -> None:
    attempt = launch_result(
        ended(-9, Termination(RunEnd.HUNG, "quiet")), None, [failure(RunEnd.OOM)], marked=True
    )
    assert attempt.end is RunEnd.OOM


def test_an_engine_that_exits_without_our_plugin_has_failed_even_with_zero() -> None:
    attempt = launch_result(ended(0, None, "some", "last words"), None, [None], marked=False)
    assert attempt.end is RunEnd.CRASHED
    assert "never loaded our plugin" in attempt.detail
    assert "last words" in attempt.detail


def test_a_kill_is_the_hosts_memory_where_the_kernel_counted_one_and_else_just_a_kill() -> None:
    launcher = "  exitcode  : -9 (pid: 77)"
    for how in ((-9, None), (1, None, launcher)):
        assert launch_result(ended(*how), None, [None], marked=True).end is RunEnd.KILLED
        assert launch_result(ended(*how, oom_kills=1), None, [None], marked=True).end is RunEnd.OOM


def test_a_full_disk_is_named_although_its_record_was_lost_with_it() -> None:
    words = "OSError: [Errno 28] No space left on device: '/run/x'"
    rust = "SafetensorError: Error while serializing: I/O error: (os error 28)"
    torch = "RuntimeError: PytorchStreamWriter failed writing file data/3: file write failed"
    for tail in ((words,), (rust,), (torch,), ("  exitcode  : 32 (pid: 77)",)):
        for failures in ([None], [failure(RunEnd.CRASHED)]):
            assert (
                launch_result(ended(1, None, *tail), None, failures, marked=True).end is RunEnd.DISK_FULL
            ), tail
        assert launch_result(ended(1, None, *tail), None, [None], marked=False).end is RunEnd.DISK_FULL


def test_a_rank_that_was_killed_is_the_cause_and_not_the_lost_connection_of_another() -> None:
    summary = ["Failures:", "exitcode  : 1 (pid: 7)", "Root Cause (first observed failure):", "[0]:"]
    lost = failure(RunEnd.CRASHED)
    killed = launch_result(
        ended(1, None, *summary, "exitcode  : -9 (pid: 8)  (SIGKILL)"), None, [lost], marked=True
    )
    assert killed.end is RunEnd.KILLED
    other = launch_result(ended(1, None, "exitcode  : -9 (pid: 8)", *summary), None, [lost], marked=True)
    assert other.end is RunEnd.KILLED, "whichever of the two the launcher saw first"
    crashed = launch_result(ended(1, None, *summary, "exitcode  : 1 (pid: 8)"), None, [lost], marked=True)
    assert crashed.end is RunEnd.CRASHED
    own_word = failure(RunEnd.BAD_DATA)
    told = launch_result(ended(1, None, *summary, "exitcode  : -9 (pid: 8)"), None, [own_word], marked=True)
    assert told.end is RunEnd.BAD_DATA


def test_a_silent_end_is_a_crash_with_its_code() -> None:
    attempt = launch_result(ended(3), None, [None], marked=True)
    assert attempt.end is RunEnd.CRASHED
    assert "ended with 3 without a word" in attempt.detail


def test_who_only_lost_the_others_does_not_say_why() -> None:
    lost = failure(RunEnd.CRASHED, 1, consequence=True)
    launcher = "  exitcode  : -9 (pid: 77)"
    assert launch_result(ended(1, None, launcher), None, [lost], marked=True).end is RunEnd.KILLED
    assert launch_result(ended(1), None, [lost, failure(RunEnd.NAN, 5)], marked=True).end is RunEnd.NAN
    assert launch_result(ended(1), None, [lost], marked=True).end is RunEnd.CRASHED
