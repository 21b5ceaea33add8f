from __future__ import annotations

import pytest

from core.progress import EndEvent, OomEvent
from core.run_files import RunEnd, RunResult
from miner.engines.base import Phase, Status, Why
from miner.jobs.states import EndReason
from miner.jobs.verdict import Verdict, verdict
from miner.watch.progress import Course
from tests.doubles.each import each


def ended(
    why: Why = Why.FAILED,
    code: int | None = 1,
    result: RunResult | None = None,
    *events: OomEvent | EndEvent,
    asked: Verdict | None = None,
    has_model: bool = False,
) -> Verdict:
    course = Course(began_at=0.0)
    for event in events:
        course.take(event, 0)
    return verdict(Status(Phase.ENDED, why, code), result, course, asked=asked, has_model=has_model)


@pytest.mark.parametrize("end", [RunEnd.FINISHED, RunEnd.EARLY, RunEnd.CLOCK])
def test_a_good_end_with_a_model_is_one(end: RunEnd) -> None:
    assert ended(Why.OK, 0, RunResult(end=end, submission=True), has_model=True).reason is EndReason.TRAINED


def test_a_good_end_without_a_model_is_none() -> None:
    said = RunResult(end=RunEnd.FINISHED, submission=True)
    assert ended(Why.OK, 0, said).reason is EndReason.BAD_SUBMISSION


def test_a_failure_with_an_earlier_model_is_a_failure_still() -> None:
    said = RunResult(end=RunEnd.OOM, submission=True, detail="CUDA out of memory")
    assert ended(Why.OK, 0, said, has_model=True) == Verdict(EndReason.OOM, "CUDA out of memory")


def test_an_end_that_we_asked_for_has_our_reason() -> None:
    hung = Verdict(EndReason.HUNG, "no step for an hour")
    said = RunResult(end=RunEnd.STOPPED, submission=True)
    assert ended(Why.STOPPED, 137, said, asked=hung, has_model=True) == hung


def test_at_the_deadline_only_the_model_counts() -> None:
    asked = Verdict(EndReason.DEADLINE, "its time is up")
    assert ended(Why.STOPPED, 137, asked=asked, has_model=True).reason is EndReason.TRAINED
    assert ended(Why.STOPPED, 137, asked=asked).reason is EndReason.STOPPED


def test_a_stop_that_we_did_not_ask_for_came_from_outside() -> None:
    said = RunResult(end=RunEnd.STOPPED, submission=True)
    assert ended(Why.KILLED, 0, said, has_model=True).reason is EndReason.KILLED
    assert ended(Why.STOPPED, 137).reason is EndReason.KILLED


@each(
    ("why", "code", "reason"),
    [
        (Why.FAILED, 1, EndReason.CRASHED),
        (Why.FAILED, 30, EndReason.OOM),
        (Why.FAILED, 20, EndReason.BAD_DATA),
        (Why.FAILED, 32, EndReason.DISK_FULL),
        (Why.FAILED, 139, EndReason.CRASHED),
        (Why.KILLED, 137, EndReason.KILLED),
        (Why.OOM_KILLED, 137, EndReason.HOST_MEMORY),
        (Why.NODE_FAIL, None, EndReason.LOST),
        (Why.LOST, None, EndReason.LOST),
        (Why.OK, 0, EndReason.BAD_SUBMISSION),
    ],
)
def test_without_a_word_of_the_trainers_the_engine_decides(
    why: Why, code: int | None, reason: EndReason
) -> None:
    assert ended(why, code).reason is reason


def test_the_last_events_speak_for_a_trainer_that_could_not_write_its_result() -> None:
    oom = OomEvent(t=0, text="tried to allocate 2 GiB")
    assert ended(Why.FAILED, 1, None, oom) == Verdict(EndReason.OOM, "tried to allocate 2 GiB")
    nan = EndEvent(t=0, end=RunEnd.NAN, submission=False, text="loss is NaN")
    assert ended(Why.FAILED, 1, None, nan) == Verdict(EndReason.NAN, "loss is NaN")


def test_a_kill_counts_as_memory_only_where_the_kernel_counted_it() -> None:
    killed = RunResult(end=RunEnd.KILLED, submission=False, detail="killed from outside")
    assert ended(Why.FAILED, 35, killed).reason is EndReason.KILLED
    assert ended(Why.OOM_KILLED, 35, killed).reason is EndReason.HOST_MEMORY


def test_an_end_without_words_names_its_code() -> None:
    assert ended(Why.FAILED, 77).detail == "ended with code 77"
