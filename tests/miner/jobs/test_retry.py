from __future__ import annotations

from core.remedies import MOST_OOM
from core.run_files import RunEnd
from miner.engines.base import Why
from miner.jobs.retry import Next, Situation, after_attempt
from miner.jobs.states import MEANING, OF_ENGINE, OF_RUN, EndReason, Retry
from miner.jobs.times import Pace
from tests.doubles.each import each

PACE = Pace(max_attempts=3, attempt_needs_s=300)


def after(
    reason: EndReason,
    *before: EndReason,
    has_model: bool = False,
    left_s: float = 3600.0,
    needs_s: float = 100.0,
) -> Next:
    return after_attempt(Situation(reason, (*before, reason), has_model, left_s, needs_s), PACE)


def test_what_was_trained_is_published() -> None:
    assert after(EndReason.TRAINED, has_model=True) is Next.PUBLISH


@each("reason", [one for one in EndReason if MEANING[one].retry is Retry.NO and one is not EndReason.TRAINED])
def test_what_another_try_can_not_mend_ends_with_what_there_is(reason: EndReason) -> None:
    assert after(reason) is Next.GIVE_UP
    assert after(reason, has_model=True) is Next.PUBLISH


@each("reason", [one for one in EndReason if MEANING[one].retry is Retry.ONCE])
def test_some_reasons_get_one_more_try(reason: EndReason) -> None:
    assert after(reason) is Next.AGAIN
    assert after(reason, reason) is Next.GIVE_UP
    assert after(reason, reason, has_model=True) is Next.PUBLISH


def test_attempts_are_counted_over_all_reasons() -> None:
    assert after(EndReason.KILLED, EndReason.CRASHED) is Next.AGAIN
    assert after(EndReason.KILLED, EndReason.CRASHED, EndReason.LOST) is Next.GIVE_UP


def test_the_ladder_and_a_full_disk_use_up_no_attempts() -> None:
    many = [EndReason.OOM] * (MOST_OOM - 2)
    assert after(EndReason.OOM, *many) is Next.AGAIN
    assert after(EndReason.OOM, *[EndReason.OOM] * MOST_OOM) is Next.GIVE_UP
    assert after(EndReason.DISK_FULL, *[EndReason.DISK_FULL] * 50) is Next.AGAIN
    assert after(EndReason.CRASHED, *many) is Next.AGAIN


def test_a_model_that_is_there_is_worth_more_than_a_try_that_can_not_end_in_time() -> None:
    assert after(EndReason.OOM, has_model=True, left_s=299) is Next.PUBLISH
    assert after(EndReason.OOM, has_model=True, left_s=301) is Next.AGAIN
    assert after(EndReason.OOM, has_model=True, left_s=301, needs_s=400) is Next.PUBLISH
    assert after(EndReason.OOM, left_s=10) is Next.AGAIN
    assert after(EndReason.OOM, left_s=0) is Next.GIVE_UP


def test_every_word_of_trainer_and_engine_has_a_reason() -> None:
    assert set(OF_RUN) == set(RunEnd)
    assert set(OF_ENGINE) == set(Why)
    assert set(MEANING) == set(EndReason)
    assert all(meaning.operator.endswith(".") and meaning.validator for meaning in MEANING.values())
