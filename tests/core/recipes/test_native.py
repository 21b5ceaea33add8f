"""The native trainer's own settings."""

from __future__ import annotations

import pytest

from core.domain.choices import Engine
from core.domain.tasks import TaskType
from core.recipes.base import RecipeError, load_templates
from core.recipes.native import NativeSettings, settings_of
from core.recipes.render import render
from tests.core.recipes.cases import inputs, text_plan


def test_the_template_has_every_setting_and_a_profile_changes_some() -> None:
    assert set(load_templates("native.yaml")) == set(NativeSettings.model_fields)
    plan = text_plan(TaskType.INSTRUCT, engine=Engine.NATIVE, engine_config={"batch_ramp": 0.1})
    settings = settings_of(plan)
    assert (settings.objective, settings.batch_ramp, settings.ramp_steps(250)) == ("rows", 0.1, 25)
    rendered = render(plan, inputs())
    assert (rendered.config["batch_ramp"], rendered.base["batch_ramp"]) == (0.1, 0.0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"batch_rampp": 1}, "did you mean batch_ramp"),
        ({"recompute": "some"}, "engine_config.native.recompute has value some"),
        ({"batch_ramp": 0.9}, "less than or equal to 0.5"),
        ({"hang_seconds": None}, "hang_seconds"),
    ],
)
def test_a_mistake_is_reported_when_the_plan_is_rendered(changes: dict[str, object], why: str) -> None:
    plan = text_plan(TaskType.INSTRUCT, engine=Engine.NATIVE, engine_config=changes)
    with pytest.raises(RecipeError, match=why):
        render(plan, inputs())
