"""The native trainer's own settings: its template, and what a profile changes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from core.domain.errors import Problem, nearest_name
from core.domain.records import Record
from core.planning.plan import TrainingPlan
from core.recipes.base import Recipe, RecipeError, RunInputs, load_templates, overlay

TEMPLATE = "native.yaml"


class NativeSettings(Record):
    """Each is explained in `configs/base/native.yaml`; a field without a line there would not load."""

    objective: Literal["rows", "tokens"]
    probe_batch: bool
    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
    recompute: Literal["layers", "cheap"]
    recompute_every: int = Field(ge=1)
    batch_ramp: float = Field(ge=0, le=0.5)
    tensorboard: bool
    hang_seconds: float = Field(ge=10)

    def ramp_steps(self, total: int) -> int:
        return round(self.batch_ramp * total)


def settings_of(plan: TrainingPlan) -> NativeSettings:
    """Read the settings. `RecipeError` for a key or a value that the trainer does not know."""
    return _checked(plan, overlay(load_templates(TEMPLATE), plan.engine_config))


def native_recipe(plan: TrainingPlan, inputs: RunInputs) -> Recipe:
    template = load_templates(TEMPLATE)
    config = overlay(template, plan.engine_config)
    _checked(plan, config)
    return Recipe(config, template, {}, frozenset(plan.engine_config), ())


def _checked(plan: TrainingPlan, config: Mapping[str, Any]) -> NativeSettings:
    try:
        return NativeSettings.model_validate(config)
    except ValidationError as error:
        problems = [_problem(details) for details in error.errors(include_url=False)]
        raise RecipeError(f"profile {plan.profile.name}", problems) from None


def _problem(details: Mapping[str, Any]) -> Problem:
    key = ".".join(str(part) for part in details["loc"])
    rule = str(details["msg"])
    if details["type"] == "extra_forbidden":
        near = nearest_name(key, NativeSettings.model_fields)
        rule = "is not a setting of the native trainer" + (f"; did you mean {near}?" if near else "")
    return Problem(f"engine_config.native.{key}", str(details["input"]), rule)
