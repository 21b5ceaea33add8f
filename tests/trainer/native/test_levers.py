"""The settings that a sweep tries."""

from __future__ import annotations

import pytest

from core.plan import TrainingPlan
from core.plan_parts import PrecisionPlan
from core.recipes.native import settings_of
from tests.trainer.native import tiny
from trainer.native import levers


@pytest.mark.parametrize("name", levers.LEVERS)
def test_every_position_of_a_lever_is_a_plan_that_differs_and_says_how_a_profile_has_it(name: str) -> None:
    plan = tiny.plan(full=True, micro=4, accumulation=2, precision=PrecisionPlan(bf16=False, tf32=False))
    settings = list(levers.LEVERS[name](plan))
    for setting in settings:
        assert setting.targets
        assert setting.plan != plan
        assert setting.plan.batch.effective == plan.batch.effective
        TrainingPlan.model_validate(setting.plan.model_dump())
        settings_of(setting.plan)
    # A CPU has but one attention.
    assert settings or name == "attention"


def test_a_plan_for_several_is_measured_on_one_with_the_batch_that_it_says() -> None:
    one = levers.measurable(tiny.plan(full=True, world=2, engine_config={"batch_ramp": 0.2}))
    assert (one.batch.world_size, one.launch.processes) == (1, 1)
    assert (settings_of(one).probe_batch, settings_of(one).batch_ramp) == (False, 0.0)
