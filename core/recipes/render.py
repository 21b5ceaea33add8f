"""From a plan to files, command and environment, checked on the way.

The one door to the renderers: nothing that the engine would not run as written gets through it, and what it
refuses it names with the profile's own word for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from core.choices import Engine
from core.errors import Problem
from core.plan import TrainingPlan
from core.recipes import ai_toolkit, axolotl, kohya, native, toml
from core.recipes.launch import command, environment
from core.recipes.run import Recipe, RecipeError, Rendered, RunInputs, refusal
from core.recipes.validate import validate

_RECIPES = {Engine.AXOLOTL: axolotl.recipe, Engine.KOHYA: kohya.recipe, Engine.AI_TOOLKIT: ai_toolkit.recipe}
_NAMES = {
    Engine.AXOLOTL: "config.yml",
    Engine.KOHYA: "config.toml",
    Engine.AI_TOOLKIT: "config.yaml",
    Engine.NATIVE: "plan.json",
}


def render(plan: TrainingPlan, inputs: RunInputs) -> Rendered:
    """Everything an attempt of this plan needs. `RecipeError` for what no engine would run as written."""
    if not plan.verdict.feasible:
        raise refusal(plan.profile, "plan", plan.verdict.code, plan.verdict.reason)
    made = recipe(plan, inputs)
    name = _NAMES[plan.engine]
    return Rendered(
        engine=plan.engine,
        config=made.config,
        base=made.base,
        files={name: _text(plan, made)},
        command=command(plan, inputs, f"{inputs.config_dir}/{name}"),
        env=environment(plan, inputs),
        notes=made.notes,
    )


def recipe(plan: TrainingPlan, inputs: RunInputs) -> Recipe:
    """The engine's configuration, checked. The native trainer reads all else from the plan itself."""
    if plan.engine is Engine.NATIVE:
        return native.recipe(plan, inputs)
    made = _RECIPES[plan.engine](plan, inputs)
    found = validate(plan.engine, made.config, gpus=plan.launch.processes, flux=kohya.is_flux(plan))
    if found:
        source = f"profile {plan.profile}, rendered for {plan.engine}"
        raise RecipeError(source, [_named(problem, made, plan) for problem in found])
    return made


def _named(problem: Problem, made: Recipe, plan: TrainingPlan) -> Problem:
    """The problem with the profile's own word beside the engine's key."""
    key, raw = _reaching(problem.where, made.origins), _reaching(problem.where, made.raw)
    if raw is not None:
        where = f"engine_config.{plan.engine} → {problem.where}"
    elif key is not None:
        where = f"targets.{made.origins[key]} → {problem.where}"
    else:
        where = problem.where
    return Problem(where, problem.value, problem.rule)


def _reaching(where: str, keys: Iterable[str]) -> str | None:
    """The longest of the keys that the place lies at or under."""
    fitting = [key for key in keys if where == key or where.startswith((f"{key}.", f"{key}["))]
    return max(fitting, key=len, default=None)


def _text(plan: TrainingPlan, made: Recipe) -> str:
    if plan.engine is Engine.NATIVE:
        return plan.to_json()
    head = [f"profile {plan.profile}, plan {plan.digest[:12]}", *made.notes]
    comment = "".join(f"# {' '.join(line.split())}\n" for line in head)
    body = toml.dumps(made.config) if plan.engine is Engine.KOHYA else _yaml(made.config)
    return comment + body


def _yaml(config: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=110)
