"""The native trainer's own settings: its template, and what a profile changes of it."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import Field, ValidationError

from core.errors import Problem
from core.facts import Record
from core.plan import TrainingPlan
from core.recipes.base import base, overlay
from core.recipes.run import Recipe, RecipeError, RunInputs

TEMPLATE = "native.yaml"


class NativeSettings(Record):
    """`configs/base/native.yaml` says what each means; a field without a line there would not load."""

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
    """`RecipeError` for a key or a value that the trainer does not know."""
    return _checked(plan, overlay(base(TEMPLATE), plan.engine_config))


def recipe(plan: TrainingPlan, inputs: RunInputs) -> Recipe:
    template = base(TEMPLATE)
    config = overlay(template, plan.engine_config)
    _checked(plan, config)
    return Recipe(config, template, {}, frozenset(plan.engine_config), ())


def _checked(plan: TrainingPlan, config: Mapping[str, Any]) -> NativeSettings:
    try:
        return NativeSettings.model_validate(config)
    except ValidationError as error:
        problems = [_problem(found) for found in error.errors(include_url=False)]
        raise RecipeError(f"profile {plan.profile}", problems) from None


def _problem(found: Mapping[str, Any]) -> Problem:
    key = ".".join(str(part) for part in found["loc"])
    rule = str(found["msg"])
    if found["type"] == "extra_forbidden":
        near = get_close_matches(key, NativeSettings.model_fields, n=1)
        rule = "is no setting of the native trainer" + (f"; do you mean {near[0]}?" if near else "")
    return Problem(f"engine_config.native.{key}", str(found["input"]), rule)
