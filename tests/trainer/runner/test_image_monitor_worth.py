"""The steps of a file for a comparison with another training's."""

from __future__ import annotations

import pytest

from core.domain.choices import LrSchedule, Optimizer
from core.domain.tasks import ImageModelType
from core.planning.plan import OptimizerPlan, StepsPlan, TrainingPlan
from tests.core.recipes.cases import image_plan
from trainer.runner.image_monitor import rate_at, worth

CONSTANT, COSINE, LINEAR = LrSchedule.CONSTANT, LrSchedule.COSINE, LrSchedule.LINEAR


def plan_of(schedule: LrSchedule) -> TrainingPlan:
    return image_plan(
        ImageModelType.KREA2,
        steps=StepsPlan(epochs=50, per_epoch=40, total=2000, eval_every=200, save_every=200),
        optimizer=OptimizerPlan(name=Optimizer.ADAMW_BNB_8BIT, learning_rate=1e-4, schedule=schedule),
    )


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
