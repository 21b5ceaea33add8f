"""What follows when steps take other than the planned time: going on, or another start."""

from __future__ import annotations

import pytest

from core.domain.choices import Engine, LrSchedule, Optimizer
from core.domain.tasks import ImageModelType
from core.planning.plan import ImagePlan, OptimizerPlan, StepsPlan, TrainingPlan
from tests.core.recipes.cases import image_plan
from trainer.runner.image_monitor import (
    Measured,
    rate_at,
    replan,
    save_interval,
    saved_steps,
    timed_steps,
    worth,
)

CONSTANT, COSINE, LINEAR = LrSchedule.CONSTANT, LrSchedule.COSINE, LrSchedule.LINEAR


def plan_of(
    schedule: LrSchedule = CONSTANT,
    total: int = 2000,
    wanted: int | None = None,
    save_every: int = 200,
    kind: ImageModelType = ImageModelType.KREA2,
) -> TrainingPlan:
    plan = image_plan(
        kind,
        steps=StepsPlan(
            epochs=50,
            per_epoch=40,
            total=total,
            wanted=wanted,
            eval_every=save_every,
            save_every=save_every,
        ),
        optimizer=OptimizerPlan(name=Optimizer.ADAMW_BNB_8BIT, learning_rate=1e-4, schedule=schedule),
        image=ImagePlan(save_every_epochs=10),
    )
    # Without a phase for saves: a step costs what it costs.
    phases = tuple(phase for phase in plan.time.phases if phase.name != "save")
    return plan.model_copy(update={"time": plan.time.model_copy(update={"phases": phases})})


def measured(step_s: float, left_s: float, start_s: float = 120.0, step: int = 52) -> Measured:
    return Measured(step, step_s, start_s, left_s)


def test_what_fits_goes_on_and_says_by_which_figures() -> None:
    decided = replan(plan_of(), measured(1.0, 2000))
    assert decided.restart is None
    assert decided.text.startswith("goes on, all 2,000 steps fit: 1 s a step after 52")


@pytest.mark.parametrize(
    ("step_s", "save_every", "restart"),
    [
        # 1,052 steps in all, 1,000 of them saved; started again 893.
        (2.0, 200, None),
        # 900 are saved, and 893 are no better.
        (2.0, 900, None),
        # 700 are saved, and 893 are well worth another start.
        (2.0, 700, 893),
        # Nothing would be saved at all.
        (5.0, 1000, 357),
    ],
)
def test_a_constant_rate_ends_early_unless_too_much_lies_behind_the_last_save(
    step_s: float, save_every: int, restart: int | None
) -> None:
    decided = replan(plan_of(CONSTANT, save_every=save_every), measured(step_s, 2000))
    assert decided.restart == restart
    assert ("ends early" in decided.text) is (restart is None)


@pytest.mark.parametrize(
    ("schedule", "step_s", "restart"),
    [
        (COSINE, 2.0, 893),  # half of it could be done, at half of the rate
        (COSINE, 1.15, None),  # 90 % could be done, where the rate is low
        (LINEAR, 1.15, 1553),  # 90 %, at 11 % of the rate
        (CONSTANT, 1.15, None),
        (COSINE, 60.0, 29),  # nothing would be saved
        (COSINE, 1500.0, 1),
        (COSINE, 2000.0, None),  # nothing fits either way
    ],
)
def test_a_decay_is_started_again_where_it_would_be_cut_off_at_a_high_rate(
    schedule: LrSchedule, step_s: float, restart: int | None
) -> None:
    assert replan(plan_of(schedule), measured(step_s, 2000)).restart == restart


@pytest.mark.parametrize(
    ("wanted", "step_s", "start_s", "restart"),
    [
        (None, 0.4, 120, None),  # the plan has all that was asked for
        (2000, 0.4, 120, None),
        (4000, 0.4, 120, 4000),  # 4,465 would fit
        (8000, 0.4, 120, 4465),
        (4000, 0.8, 120, None),  # 2,232 are too few more
        (4000, 0.4, 1100, None),  # starting takes too long
    ],
)
def test_steps_that_the_clock_had_cut_come_back_if_another_start_brings_enough(
    wanted: int | None, step_s: float, start_s: float, restart: int | None
) -> None:
    decided = replan(plan_of(COSINE, wanted=wanted), measured(step_s, 2000, start_s))
    assert decided.restart == restart


def test_saves_cost_time_as_planned() -> None:
    plan = plan_of(COSINE)
    phase = plan.time.phases[0].model_copy(update={"name": "save", "seconds": 1000.0})
    slow = plan.model_copy(
        update={"time": plan.time.model_copy(update={"phases": (*plan.time.phases, phase)})}
    )
    assert replan(plan, measured(1.0, 1950)).restart is None
    assert replan(slow, measured(1.0, 1950)).restart == 1159


def test_files_are_saved_at_steps_or_at_the_end_of_epochs() -> None:
    assert save_interval(plan_of()) == 200
    kohya = plan_of(kind=ImageModelType.SDXL)
    assert kohya.engine is Engine.KOHYA
    assert save_interval(kohya) == 400
    assert (saved_steps(kohya, 1300), saved_steps(kohya, 2000), saved_steps(kohya, 399)) == (1200, 2000, 0)


@pytest.mark.parametrize(("total", "timed"), [(2000, 50), (500, 50), (94, 9), (10, 5)])
def test_short_trainings_are_measured_shortly(total: int, timed: int) -> None:
    assert timed_steps(total) == timed


@pytest.mark.parametrize(("taken", "timed"), [(0.0, 50), (0.049, 50), (0.05, 5), (2.0, 5)])
def test_slow_trainings_are_measured_by_few_steps(taken: float, timed: int) -> None:
    assert timed_steps(2000, taken) == timed


def test_the_end_of_a_decay_is_not_cut_off_whatever_its_least_rate() -> None:
    plan = plan_of(COSINE)
    high = plan.optimizer.model_copy(update={"min_lr_ratio": 0.5})
    ends_high = plan.model_copy(update={"optimizer": high})
    assert [worth(plan, step) for step in (200, 1000, 1800, 2000)] == [100, 500, 1800, 2000]
    assert [worth(ends_high, step) for step in (1800, 2000)] == [900, 2000]
    assert worth(plan_of(CONSTANT), 200) == 200


def test_the_rate_of_a_schedule_at_its_parts() -> None:
    assert [rate_at(plan_of(CONSTANT), part) for part in (0, 1)] == [1, 1]
    assert [rate_at(plan_of(COSINE), part) for part in (0, 0.5, 1)] == pytest.approx([1, 0.5, 0])
    assert [rate_at(plan_of(LINEAR), part) for part in (0, 0.25, 2)] == pytest.approx([1, 0.75, 0])
