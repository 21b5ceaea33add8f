"""The schedule over a forecast number of steps, and the reaction to a plateau."""

# Once: it needs nothing of the training stack.

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.domain.choices import LrSchedule, Optimizer
from core.planning.plan import LrStage, OptimizerPlan, PlateauPlan
from trainer.session.learning_rate import MAX_FACTOR, MIN_FACTOR, PlateauFactor, ScheduleProgress, rate_factor


def optimizer(schedule: LrSchedule, **changes: Any) -> OptimizerPlan:
    return OptimizerPlan(name=Optimizer.ADAMW_TORCH, learning_rate=1e-3, **{"schedule": schedule, **changes})


def rates(plan: OptimizerPlan, total: int, warmup: int = 0) -> list[float]:
    """The factors of a whole training."""
    schedule, factors = ScheduleProgress(total, warmup), []
    for _ in range(total):
        factors.append(rate_factor(plan, schedule))
        schedule.advance()
    return factors


DECAYING = (LrSchedule.LINEAR, LrSchedule.COSINE, LrSchedule.COSINE_WITH_MIN_LR, LrSchedule.ONE_CYCLE)


@pytest.mark.parametrize("schedule", DECAYING)
def test_a_decay_begins_at_the_peak_after_the_warmup_and_ends_near_nothing(schedule: LrSchedule) -> None:
    factors = rates(optimizer(schedule), 100, warmup=10)
    assert max(factors) == pytest.approx(1.0)
    assert factors.index(max(factors)) in (9, 10)
    assert factors[-1] < 0.02
    assert factors[10:] == sorted(factors[10:], reverse=True)


def test_the_first_step_moves_the_weights_and_the_last_has_the_least_rate_that_was_asked_for() -> None:
    factors = rates(optimizer(LrSchedule.LINEAR, min_lr_ratio=0.25), 400, warmup=10)
    assert factors[0] == pytest.approx(0.1)
    assert factors[-1] == pytest.approx(0.25, abs=0.005)


def test_restarts_come_as_often_as_asked_and_the_last_cycle_ends_low() -> None:
    factors = rates(optimizer(LrSchedule.COSINE_WITH_RESTARTS, cycles=4), 400)
    jumps = [at for at in range(1, 400) if factors[at] > factors[at - 1] + 0.5]
    assert jumps == [pytest.approx(at, abs=1) for at in (100, 200, 300)]
    assert factors[-1] < 0.01


def test_warmup_stable_decay_holds_until_the_cooldown() -> None:
    factors = rates(optimizer(LrSchedule.WSD, cooldown_share=0.2), 100)
    assert set(factors[:80]) == {1.0}
    assert factors[80:] == sorted(factors[80:], reverse=True)
    assert factors[-1] < 0.06


STAGES = (LrStage(share=0.3, factor=1.0), LrStage(share=0.5, factor=0.5), LrStage(share=0.2, factor=0.1))


@pytest.mark.parametrize(
    ("plan", "warmup", "expected"),
    [
        (optimizer(LrSchedule.CONSTANT), 5, [1.0] * 20),
        (optimizer(LrSchedule.CONSTANT_WITH_WARMUP), 5, [0.2, 0.4, 0.6, 0.8] + [1.0] * 16),
        (optimizer(LrSchedule.CONSTANT, stages=STAGES), 0, [1.0] * 6 + [0.5] * 10 + [0.1] * 4),
    ],
    ids=["constant", "with a warmup", "three stages"],
)
def test_a_constant_rate_stays_but_for_warmup_and_stages(
    plan: OptimizerPlan, warmup: int, expected: list[float]
) -> None:
    assert rates(plan, 20, warmup) == pytest.approx(expected)


def test_a_warmup_takes_half_of_a_training_that_turns_out_short() -> None:
    factors = rates(optimizer(LrSchedule.LINEAR), 10, warmup=1000)
    assert factors.index(max(factors)) in (4, 5)
    assert factors[-1] < 0.25


@given(st.lists(st.integers(20, 5000), min_size=1, max_size=20), st.sampled_from(DECAYING))
def test_however_often_the_forecast_changes_the_rate_never_jumps_up_and_ends_decayed(
    forecasts: list[int], schedule: LrSchedule
) -> None:
    plan, progress = optimizer(schedule), ScheduleProgress(forecasts[0], 5)
    before, every = None, 15
    while progress.done < progress.total:
        if progress.done % every == 0 and progress.done // every < len(forecasts):
            progress.forecast(forecasts[progress.done // every])
            if progress.done >= progress.total:
                break
        rate = rate_factor(plan, progress)
        assert before is None or progress.done <= 5 or rate <= before + 1e-9
        assert 0 <= rate <= 1
        before = rate
        progress.advance()
    assert progress.fraction <= 1 + 1e-9


@given(st.integers(50, 2000), st.integers(1, 49))
def test_a_correction_spreads_the_way_that_is_left_over_the_steps_that_are_left(total: int, at: int) -> None:
    schedule = ScheduleProgress(total)
    for _ in range(at):
        schedule.advance()
    schedule.forecast(total * 2)
    while schedule.done < schedule.total:
        schedule.advance()
    assert schedule.fraction == pytest.approx(1.0)


def test_a_schedule_resumes_where_another_process_left_it() -> None:
    one = ScheduleProgress(100, 10)
    for _ in range(37):
        one.advance()
    other = ScheduleProgress(7, 10)
    other.restore(one.state())
    assert other == one


def test_one_cycle_rises_along_a_cosine_from_a_25th() -> None:
    factors = rates(optimizer(LrSchedule.ONE_CYCLE), 1000, warmup=100)
    assert factors[0] == pytest.approx(1 / 25, abs=1e-3)
    assert factors[49] == pytest.approx((1 + 1 / 25) / 2, abs=1e-3)
    assert factors[99] == pytest.approx(1.0)


PLATEAU = PlateauPlan(factor=0.8, growth=1.05, patience=2)


def test_a_plateau_lowers_the_rate_after_the_patience_and_reports_it() -> None:
    plateau = PlateauFactor(PLATEAU)
    assert plateau.update(better=False) is None
    change = plateau.update(better=False)
    assert change is not None
    assert "0.8" in change
    assert plateau.factor == 0.8
    assert plateau.update(better=False) is None


def test_the_rate_rises_while_the_score_improves_where_growth_was_asked_for() -> None:
    plateau = PlateauFactor(PLATEAU)
    assert plateau.update(better=True) is not None
    assert plateau.factor == 1.05
    assert PlateauFactor(PlateauPlan(factor=0.5)).update(better=True) is None


@given(st.lists(st.booleans(), max_size=200))
def test_the_rate_stays_within_its_bounds_whatever_the_scores_do(judged: list[bool]) -> None:
    plateau = PlateauFactor(PLATEAU)
    for better in judged:
        plateau.update(better)
        assert MIN_FACTOR <= plateau.factor <= MAX_FACTOR


def test_a_resumed_run_keeps_the_factor() -> None:
    one, other = PlateauFactor(PLATEAU), PlateauFactor(PLATEAU)
    for better in (False, False, False):
        one.update(better)
    other.restore(one.state())
    assert other == one
