"""What the clock makes of measured steps, evaluations and saves."""

from __future__ import annotations

import math
from typing import Any

import pytest

from core.runs.run_files import HeldOutScore
from tests.doubles.each import each
from tests.trainer.session.simulated import START, Time, plan_of
from trainer.session.clock import ENOUGH_STEPS, EVAL_SHARE, SPARE_S, BestScore, RunClock


def clock(time: Time, seconds: float, total: int = 100, wanted: int = 1000, **changes: Any) -> RunClock:
    return RunClock(plan_of(total, wanted, 1.0, **changes), end_by=START + seconds, now=time)


def step(one: RunClock, time: Time, seconds: float, times: int = 1) -> None:
    for _ in range(times):
        time.pass_by(seconds)
        one.stepped(seconds)


def test_a_few_timed_steps_settle_how_many_fit() -> None:
    time = Time()
    one = clock(time, 1000.0)
    one.evaluated(1.0)
    one.submitted(1.0)
    one.saved(1.0)
    step(one, time, 4.0, times=3 + ENOUGH_STEPS)
    assert one.after_step().total == pytest.approx(1000 / 4, rel=0.15)


def test_the_first_steps_are_not_counted_because_they_compile_and_allocate() -> None:
    time = Time()
    one = clock(time, 1000.0)
    step(one, time, 60.0, times=3)
    step(one, time, 1.0, times=ENOUGH_STEPS)
    assert one.step_s == pytest.approx(1.0)


def test_the_finish_begins_early_enough_for_the_slowest_of_the_last_evaluations() -> None:
    time = Time()
    one = clock(time, 100.0)
    for seconds in (5.0, 20.0, 5.0):
        one.evaluated(seconds)
    one.submitted(10.0)
    step(one, time, 1.0, times=10)
    time.now = START + 100 - one.finish_s - 1.0
    assert one.finish_s >= 30
    assert one.after_step().stop


def test_a_step_that_would_not_end_in_time_is_not_started() -> None:
    time = Time()
    one = clock(time, 1000.0)
    one.evaluated(1.0)
    one.submitted(1.0)
    step(one, time, 100.0, times=3 + ENOUGH_STEPS)
    time.now = START + 1000 - one.finish_s - 50
    assert one.after_step().stop


def test_evaluations_keep_apart_as_far_as_their_share_of_the_time_demands() -> None:
    time = Time()
    one = clock(time, 10_000.0, total=1000)
    one.evaluated(50.0)
    step(one, time, 1.0, times=20)
    one.forecast()
    assert one.eval_every >= 500


def test_a_very_short_training_is_evaluated_as_often_as_asked_while_there_is_time() -> None:
    time = Time()
    one = clock(time, 600.0, total=100, wanted=100)
    one.evaluated(1.0)
    step(one, time, 0.01, times=10)
    one.forecast()
    assert 8 <= one.total // one.eval_every <= 12


@each(
    ("seconds", "wanted", "step_s", "eval_s", "submit_s"),
    [
        (900, 40, 8, 120, 20),
        (900, 100, 5, 90, 5),
        (3000, 300, 5, 300, 1),
        (1500, 60, 5, 60, 5),
        (600, 100, 0.01, 1, 1),
    ],
)
def test_no_step_is_given_for_an_evaluation_in_spare_time(
    seconds: float, wanted: int, step_s: float, eval_s: float, submit_s: float
) -> None:
    time = Time()
    one = clock(time, seconds, total=wanted, wanted=wanted)
    one.evaluated(eval_s)
    evaluations: list[int] = []
    while True:
        step(one, time, step_s)
        orders = one.after_step()
        if orders.evaluate or orders.stop:
            evaluations.append(one.done)
            time.pass_by(eval_s + submit_s)
            one.evaluated(eval_s)
            one.submitted(submit_s)
        if orders.stop:
            break
    assert one.done == wanted
    assert time.now <= START + seconds
    assert (len(evaluations) - 1) * eval_s <= SPARE_S + EVAL_SHARE * wanted * step_s + eval_s


def test_a_run_that_turns_out_short_is_evaluated_as_often_as_a_long_one() -> None:
    time = Time()
    one = clock(time, 300.0, total=1000)
    one.evaluated(0.1)
    step(one, time, 3.0, times=10)
    one.forecast()
    assert 4 <= one.total // one.eval_every <= 30


def test_more_time_than_the_plan_knew_of_is_used() -> None:
    time = Time()
    one = clock(time, 1_000_000.0, wanted=5000)
    step(one, time, 1.0, times=10)
    assert one.after_step().total == 5000


def score(value: float, lower: bool = True, step: int = 1) -> HeldOutScore:
    return HeldOutScore.model_construct(value=value, metric="eval_loss", lower_is_better=lower, step=step)


def test_better_is_lower_for_a_loss_and_higher_for_a_reward() -> None:
    loss, reward = BestScore(), BestScore()
    assert [loss.update(score(value)) for value in (2.0, 2.5, 1.5)] == [True, False, True]
    assert [reward.update(score(value, lower=False)) for value in (0.2, 0.1, 0.3)] == [True, False, True]


def test_what_is_no_number_is_never_better() -> None:
    best = BestScore()
    assert not best.update(score(math.nan))
    assert not best.update(score(-math.inf))
    assert best.score is None


def test_patience_ends_after_as_many_evaluations_without_a_better_one() -> None:
    """An equal score is not better."""
    best = BestScore(patience=2)
    for value, exhausted in ((1.0, False), (1.1, False), (0.9, False), (0.9, False), (1.0, True)):
        best.update(score(value))
        assert best.exhausted is exhausted
