"""The largest training that ends in time."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.data.facts import assumed_facts
from core.domain.tasks import TaskType
from core.planning.time.schedule import (
    LEAST_EVAL_ROWS,
    Cadence,
    RepeatTimes,
    StepSchedule,
    _overhead,
    fit_schedule,
    held_out,
    most_steps,
    wanted_steps,
)
from core.planning.time.sequences import BatchShape, Sequences, sequence_options, text_sequences
from core.profile.limits import ProfileLimits
from core.profile.targets import Targets
from tests.core.planning.candidates import a_candidate
from tests.doubles.each import each

CANDIDATE = a_candidate(micro=8, accumulation=4, length=1024)


def _sequences(rows: int = 32_000) -> Sequences:
    targets = Targets(sample_packing=False)
    return text_sequences(
        assumed_facts(TaskType.INSTRUCT, rows), sequence_options(targets), 4096, rows, BatchShape(8, 32, 1)
    )


RATE = RepeatTimes(step_s=1.0, eval_s=20.0, save_s=5.0)


def _fit(
    seconds: float = 1e6,
    rate: RepeatTimes = RATE,
    eval_rows: int = 500,
    limits: dict[str, Any] | None = None,
    **targets: Any,
) -> StepSchedule:
    wanted, bounds = Targets(**targets), ProfileLimits(**(limits or {}))
    return fit_schedule(CANDIDATE, _sequences(), rate, eval_rows, seconds, wanted, bounds)


def test_all_epochs_are_planned_if_there_is_time() -> None:
    schedule = _fit(num_epochs=2)
    assert schedule.complete
    assert schedule.epochs == pytest.approx(2)
    assert schedule.total == 2 * schedule.per_epoch


def test_without_epochs_in_the_profile_the_limit_applies() -> None:
    assert _fit(limits={"max_epochs": 3}).epochs == pytest.approx(3)


@each(("rows", "passes"), [(32_000, 3.0), (10_000, 3.0), (3_200, 4.0), (160, 8.4)])
def test_few_rows_are_passed_over_more_often(rows: int, passes: float) -> None:
    """A profile says by which power; nothing changes from 10,000 rows on."""
    limits = ProfileLimits(max_epochs=3, few_rows_power=0.25)
    _, epochs = wanted_steps(_sequences(rows), 32, Targets(), limits)
    assert epochs == pytest.approx(passes, rel=0.02)
    assert wanted_steps(_sequences(rows), 32, Targets(num_epochs=2), limits)[1] == pytest.approx(2)


def test_the_clock_cuts_what_does_not_fit() -> None:
    schedule = _fit(600)
    assert not schedule.complete
    assert 0 < schedule.total < 600


def test_steps_are_capped_by_whichever_limit_is_lower() -> None:
    assert _fit(max_steps=100).total == 100
    assert _fit(max_steps=100, limits={"max_steps": 40}).total == 40


def test_about_ten_evaluations_fall_into_a_run() -> None:
    schedule = _fit()
    assert math.ceil(schedule.total / schedule.eval_every) in (9, 10)


def test_the_profiles_intervals_are_kept_and_saves_rounded_to_evaluations() -> None:
    schedule = _fit(eval_steps=300, save_steps=400)
    assert (schedule.eval_every, schedule.save_every) == (300, 600)


def test_evaluations_take_no_more_than_their_share() -> None:
    schedule = _fit(eval_steps=10, limits={"eval_share": 0.05})
    assert schedule.eval_every == 400
    assert schedule.eval_s - 20 <= 0.05 * schedule.train_s + 20  # the first comes before any step


def test_evaluations_of_a_short_run_become_smaller() -> None:
    schedule = _fit(rate=RepeatTimes(step_s=1.0, eval_s=500.0, save_s=1.0), max_steps=100)
    assert 0 < schedule.eval_rows < 500
    assert schedule.eval_s < 100


@pytest.mark.parametrize(
    ("eval_s", "rows", "kept"), [(300.0, 500, LEAST_EVAL_ROWS), (5.0, 5, 5)], ids=["many rows", "few rows"]
)
def test_an_evaluation_keeps_enough_rows_to_compare_checkpoints(eval_s: float, rows: int, kept: int) -> None:
    rate = RepeatTimes(step_s=0.01, eval_s=eval_s, save_s=0.1)
    assert _fit(rate=rate, eval_rows=rows, max_steps=40).eval_rows == kept


def test_slow_evaluations_do_not_take_a_short_runs_time() -> None:
    rate = RepeatTimes(step_s=20.0, eval_s=600.0, save_s=5.0)
    schedule = _fit(400.0, rate, 64, max_steps=40)
    assert 1 <= schedule.eval_rows < LEAST_EVAL_ROWS
    assert schedule.total >= 10


seconds = st.floats(min_value=-100, max_value=50_000)


@given(
    seconds,
    seconds,
    st.integers(1, 500) | st.none(),
    st.integers(1, 500) | st.none(),
    st.floats(min_value=0.01, max_value=30),
    st.floats(min_value=0, max_value=400),
    st.floats(min_value=0, max_value=200),
)
def test_more_time_never_means_fewer_steps_and_none_overruns(
    one: float, two: float, evals: int | None, saves: int | None, step: float, eval_s: float, save_s: float
) -> None:
    budgets, rate = sorted((one, two)), RepeatTimes(step, eval_s, save_s)
    schedules = [_fit(budget, rate, 300, eval_steps=evals, save_steps=saves) for budget in budgets]
    assert schedules[0].total <= schedules[1].total
    for schedule, budget in zip(schedules, budgets, strict=True):
        spent = schedule.train_s + schedule.eval_s + schedule.save_s
        assert schedule.total == 0 or spent <= budget + 1e-6
        assert schedule.save_every % schedule.eval_every == 0


@each(
    ("task", "rows", "expected"),
    [
        (TaskType.INSTRUCT, 10_000, 200),
        (TaskType.INSTRUCT, 1_000_000, 500),
        (TaskType.GRPO, 10_000, 64),
        (TaskType.INSTRUCT, 20, 0),
        (TaskType.IMAGE, 50, 0),
    ],
)
def test_rows_are_held_out_where_there_are_some_to_spare(task: TaskType, rows: int, expected: int) -> None:
    assert held_out(task, rows, Targets()) == expected


def test_few_rows_are_held_out_in_a_larger_share_where_the_profile_asks() -> None:
    asked = Targets(val_set_size=0.03, val_rows_min=400, val_rows_max=1000)
    held = [held_out(TaskType.INSTRUCT, rows, asked) for rows in (30, 500, 2000, 10_000, 20_000, 90_000)]
    assert held == [0, 100, 400, 400, 600, 1000]


def test_an_epoch_smaller_than_a_batch_is_still_a_step() -> None:
    steps, epochs = wanted_steps(_sequences(rows=3), 64, Targets(num_epochs=5), ProfileLimits())
    assert (steps, epochs) == (5, 5)


@given(
    st.integers(0, 300),
    st.builds(RepeatTimes, st.floats(0.01, 9), st.floats(0, 60), st.floats(0, 60)),
    st.builds(
        Cadence,
        st.none() | st.integers(1, 90),
        st.none() | st.integers(1, 90),
        st.integers(1, 40),
        st.integers(1, 40),
        st.floats(0, 60),
    ),
    st.floats(-100, 4000),
)
def test_the_bisection_finds_the_same_steps_as_trying_each_number(
    wanted: int, rate: RepeatTimes, cadence: Cadence, seconds: float
) -> None:
    tried = range(1, wanted + 1)
    enough = [steps * rate.step_s + _overhead(steps, rate, cadence) <= seconds for steps in tried]
    assert most_steps(wanted, rate, cadence, seconds) == sum(enough)


def test_patience_gets_evaluations_enough_to_mean_something() -> None:
    patient: dict[str, Any] = {"num_epochs": 0.3, "eval_steps": 500, "early_stopping_patience": 5}
    quick = RATE._replace(eval_s=2.5)
    asked, patience = _fit(num_epochs=0.3, eval_steps=500, rate=quick), _fit(**patient, rate=quick)
    assert asked.eval_every == asked.total == patience.total == 300
    assert patience.eval_every == 30
    # Not at the price of the training: evaluations keep to their share of the time.
    rare = _fit(**patient, rate=RATE._replace(eval_s=14.0))
    assert rare.eval_every == 140
    assert _fit(**{**patient, "eval_steps": 26}, rate=quick).eval_every == 26


def test_evaluations_for_patience_take_no_time_from_the_steps() -> None:
    quick, targets = RATE._replace(eval_s=2.5), {"num_epochs": 0.3, "eval_steps": 500}
    for seconds in (100.0, 200.0, 320.0):
        asked = _fit(seconds, quick, **targets)
        assert _fit(seconds, quick, **targets, early_stopping_patience=5) == asked
