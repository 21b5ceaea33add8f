from __future__ import annotations

from core.domain.job_states import END_MEANINGS, EndReason, RetryRule
from core.runs.progress import EndEvent, OomEvent
from core.runs.remedies import MAX_OOM_STEPS, REASON_OF_RUN_END, AttemptFailure
from core.runs.run_files import RunEnd, RunResult
from miner.backends.base import EndCause, RunPhase, RunStatus
from miner.jobs.progress import RunProgress
from miner.jobs.timeline import JobTimings
from miner.jobs.verdict import (
    REASON_OF_BACKEND_END,
    AttemptVerdict,
    NextAction,
    RetrySituation,
    attempt_verdict,
    next_action,
)
from tests.doubles.each import each


def ended(
    why: EndCause = EndCause.FAILED,
    code: int | None = 1,
    result: RunResult | None = None,
    *events: OomEvent | EndEvent,
    stop_verdict: AttemptVerdict | None = None,
    has_model: bool = False,
) -> AttemptVerdict:
    progress = RunProgress(began_at=0.0)
    for event in events:
        progress.add(event, 0)
    return attempt_verdict(
        RunStatus(RunPhase.ENDED, why, code), result, progress, stop_verdict=stop_verdict, has_model=has_model
    )


@each(
    ("end", "has_model", "reason"),
    [
        (RunEnd.FINISHED, True, EndReason.TRAINED),
        (RunEnd.EARLY, True, EndReason.TRAINED),
        (RunEnd.CLOCK, True, EndReason.TRAINED),
        (RunEnd.FINISHED, False, EndReason.BAD_SUBMISSION),
        (RunEnd.OOM, True, EndReason.OOM),
    ],
)
def test_the_trainers_result_counts_and_a_good_end_needs_a_model(
    end: RunEnd, has_model: bool, reason: EndReason
) -> None:
    result = RunResult(end=end, submission=True, detail="said so")
    assert ended(EndCause.OK, 0, result, has_model=has_model) == AttemptVerdict(reason, "said so")


def test_an_end_that_we_asked_for_has_our_reason() -> None:
    hung = AttemptVerdict(EndReason.HUNG, "no step for an hour")
    result = RunResult(end=RunEnd.STOPPED, submission=True)
    assert ended(EndCause.STOPPED, 137, result, stop_verdict=hung, has_model=True) == hung


def test_at_the_deadline_only_the_model_counts() -> None:
    stop_verdict = AttemptVerdict(EndReason.DEADLINE, "its time is up")
    assert ended(EndCause.STOPPED, 137, stop_verdict=stop_verdict, has_model=True).reason is EndReason.TRAINED
    assert ended(EndCause.STOPPED, 137, stop_verdict=stop_verdict).reason is EndReason.STOPPED


def test_a_stop_that_we_did_not_ask_for_came_from_outside() -> None:
    result = RunResult(end=RunEnd.STOPPED, submission=True)
    assert ended(EndCause.KILLED, 0, result, has_model=True).reason is EndReason.KILLED
    assert ended(EndCause.STOPPED, 137).reason is EndReason.KILLED


@each(
    ("why", "code", "reason"),
    [
        (EndCause.FAILED, 1, EndReason.CRASHED),
        (EndCause.FAILED, 30, EndReason.OOM),
        (EndCause.FAILED, 20, EndReason.BAD_DATA),
        (EndCause.FAILED, 32, EndReason.DISK_FULL),
        (EndCause.FAILED, 139, EndReason.CRASHED),
        (EndCause.KILLED, 137, EndReason.KILLED),
        (EndCause.OOM_KILLED, 137, EndReason.HOST_MEMORY),
        (EndCause.NODE_FAIL, None, EndReason.NODE_FAILED),
        (EndCause.PREEMPTED, 143, EndReason.PREEMPTED),
        (EndCause.CANCELLED, None, EndReason.CANCELLED_OUTSIDE),
        (EndCause.NOT_STARTED, None, EndReason.NOT_STARTED),
        (EndCause.LOST, None, EndReason.LOST),
        (EndCause.OK, 0, EndReason.BAD_SUBMISSION),
    ],
)
def test_without_a_word_of_the_trainers_the_backend_decides(
    why: EndCause, code: int | None, reason: EndReason
) -> None:
    assert ended(why, code).reason is reason


def test_the_last_events_speak_for_a_trainer_that_could_not_write_its_result() -> None:
    oom = OomEvent(t=0, text="tried to allocate 2 GiB")
    assert ended(EndCause.FAILED, 1, None, oom) == AttemptVerdict(EndReason.OOM, "tried to allocate 2 GiB")
    nan = EndEvent(t=0, end=RunEnd.NAN, submission=False, text="loss is NaN")
    assert ended(EndCause.FAILED, 1, None, nan) == AttemptVerdict(EndReason.NAN, "loss is NaN")


def test_a_kill_counts_as_memory_only_where_the_kernel_counted_it() -> None:
    killed = RunResult(end=RunEnd.KILLED, submission=False, detail="killed from outside")
    assert ended(EndCause.FAILED, 35, killed).reason is EndReason.KILLED
    assert ended(EndCause.OOM_KILLED, 35, killed).reason is EndReason.HOST_MEMORY


def test_an_end_without_words_names_its_code() -> None:
    assert ended(EndCause.FAILED, 77).detail == "ended with code 77"


PACE = JobTimings(max_attempts=3, attempt_needs_s=300)


def after(
    reason: EndReason,
    *before: EndReason,
    has_model: bool = False,
    left_s: float = 3600.0,
    needs_s: float = 100.0,
) -> NextAction:
    failures = tuple(AttemptFailure(each_reason) for each_reason in (*before, reason))
    return next_action(RetrySituation(reason, failures, has_model, left_s, needs_s), PACE)


def test_what_was_trained_is_published() -> None:
    assert after(EndReason.TRAINED, has_model=True) is NextAction.PUBLISH


@each(
    "reason",
    [
        reason
        for reason in EndReason
        if END_MEANINGS[reason].retry is RetryRule.NO and reason is not EndReason.TRAINED
    ],
)
def test_what_another_try_cannot_mend_ends_with_what_there_is(reason: EndReason) -> None:
    assert after(reason) is NextAction.GIVE_UP
    assert after(reason, has_model=True) is NextAction.PUBLISH


@each("reason", [reason for reason in EndReason if END_MEANINGS[reason].retry is RetryRule.ONCE])
def test_some_reasons_get_one_more_try(reason: EndReason) -> None:
    assert after(reason) is NextAction.AGAIN
    assert after(reason, reason) is NextAction.GIVE_UP
    assert after(reason, reason, has_model=True) is NextAction.PUBLISH


def test_attempts_are_counted_over_all_reasons() -> None:
    assert after(EndReason.KILLED, EndReason.CRASHED) is NextAction.AGAIN
    assert after(EndReason.KILLED, EndReason.CRASHED, EndReason.LOST) is NextAction.GIVE_UP


def test_the_ladder_and_a_full_disk_use_up_no_attempts() -> None:
    many = [EndReason.OOM] * (MAX_OOM_STEPS - 2)
    assert after(EndReason.OOM, *many) is NextAction.AGAIN
    assert after(EndReason.OOM, *[EndReason.OOM] * MAX_OOM_STEPS) is NextAction.GIVE_UP
    assert after(EndReason.DISK_FULL, *[EndReason.DISK_FULL] * 50) is NextAction.AGAIN
    assert after(EndReason.CRASHED, *many) is NextAction.AGAIN


def test_a_model_that_is_there_is_worth_more_than_a_try_that_cannot_end_in_time() -> None:
    assert after(EndReason.OOM, has_model=True, left_s=299) is NextAction.PUBLISH
    assert after(EndReason.OOM, has_model=True, left_s=301) is NextAction.AGAIN
    assert after(EndReason.OOM, has_model=True, left_s=301, needs_s=400) is NextAction.PUBLISH
    assert after(EndReason.OOM, left_s=10) is NextAction.AGAIN
    assert after(EndReason.OOM, left_s=0) is NextAction.GIVE_UP


def test_every_word_of_trainer_and_backend_has_a_reason() -> None:
    assert set(REASON_OF_RUN_END) == set(RunEnd)
    assert set(REASON_OF_BACKEND_END) == set(EndCause)
    assert set(END_MEANINGS) == set(EndReason)
    assert all(meaning.operator.endswith(".") and meaning.validator for meaning in END_MEANINGS.values())
