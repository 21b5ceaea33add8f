"""Render a plan: files, command and environment, checked on the way.

The only entry to the recipes: it refuses whatever the engine would not run as written, and names each
problem by the profile's own key.
"""

from __future__ import annotations

from collections.abc import Iterable

import yaml

from core.domain.choices import Engine
from core.domain.errors import Problem
from core.planning.plan import TrainingPlan
from core.recipes import native, pictures
from core.recipes.ai_toolkit import recipe as ai_toolkit_recipe
from core.recipes.ai_toolkit import rules as ai_toolkit_rules
from core.recipes.axolotl import recipe as axolotl_recipe
from core.recipes.axolotl import rules as axolotl_rules
from core.recipes.base import Recipe, RecipeError, RenderedRun, RunInputs, unsupported_target
from core.recipes.kohya import recipe as kohya_recipe
from core.recipes.kohya import rules as kohya_rules
from core.recipes.launch import launch_command, launch_environment
from core.recipes.schema import ConfigMapping, check_keys, engine_table, find_secrets

_RECIPES = {
    Engine.AXOLOTL: axolotl_recipe.axolotl_recipe,
    Engine.KOHYA: kohya_recipe.kohya_recipe,
    Engine.AI_TOOLKIT: ai_toolkit_recipe.ai_toolkit_recipe,
}
_NAMES = {
    Engine.AXOLOTL: "config.yml",
    Engine.KOHYA: "config.toml",
    Engine.AI_TOOLKIT: "config.yaml",
    Engine.NATIVE: "plan.json",
    Engine.PICTURES: "recipe.yaml",
}


def render(plan: TrainingPlan, inputs: RunInputs) -> RenderedRun:
    """Render what an attempt of this plan needs. `RecipeError` if the engine would not run it as written."""
    if not plan.verdict.feasible:
        raise unsupported_target(plan.profile.name, "plan", plan.verdict.code, plan.verdict.reason)
    recipe = _checked_recipe(plan, inputs)
    name = _NAMES[plan.engine]
    return RenderedRun(
        config=recipe.config,
        base=recipe.base,
        files={name: _text(plan, recipe)},
        command=launch_command(plan, inputs, f"{inputs.config_dir}/{name}"),
        env=launch_environment(plan, inputs),
        notes=recipe.notes,
    )


def _checked_recipe(plan: TrainingPlan, inputs: RunInputs) -> Recipe:
    """Make and check the engine's configuration. Our own trainers need no more than the plan has."""
    if plan.engine is Engine.NATIVE:
        return native.native_recipe(plan, inputs)
    if plan.engine is Engine.PICTURES:
        return pictures.pictures_recipe(plan, inputs)
    recipe = _RECIPES[plan.engine](plan, inputs)
    problems = validate(
        plan.engine, recipe.config, gpus=plan.launch.processes, flux=kohya_recipe.is_flux(plan)
    )
    if problems:
        source = f"profile {plan.profile.name}, rendered for {plan.engine}"
        raise RecipeError(source, [_named(problem, recipe, plan) for problem in problems])
    return recipe


def _named(problem: Problem, recipe: Recipe, plan: TrainingPlan) -> Problem:
    """The problem with the profile's own key before the engine's."""
    key, raw = _key_at(problem.where, recipe.origins), _key_at(problem.where, recipe.raw)
    if raw is not None:
        where = f"engine_config.{plan.engine} → {problem.where}"
    elif key is not None:
        where = f"targets.{recipe.origins[key]} → {problem.where}"
    else:
        where = problem.where
    return Problem(where, problem.value, problem.rule)


def _key_at(where: str, keys: Iterable[str]) -> str | None:
    """The longest of the keys that `where` is at or under."""
    matches = [key for key in keys if where == key or where.startswith((f"{key}.", f"{key}["))]
    return max(matches, key=len, default=None)


def _text(plan: TrainingPlan, recipe: Recipe) -> str:
    if plan.engine is Engine.NATIVE:
        return plan.to_json()
    head = [f"profile {plan.profile.name}, plan {plan.digest[:12]}", *recipe.notes]
    comment = "".join(f"# {' '.join(line.split())}\n" for line in head)
    if plan.engine is Engine.KOHYA:
        return comment + kohya_recipe.dump_toml(recipe.config)
    return comment + yaml.safe_dump(recipe.config, sort_keys=False, allow_unicode=True, width=110)


def validate(engine: Engine, config: ConfigMapping, *, gpus: int, flux: bool = False) -> list[Problem]:
    """Find every problem; `flux` chooses between kohya's two trainers."""
    if engine is Engine.AXOLOTL:
        table = axolotl_rules.axolotl_table(config)
        problems = check_keys(table, table.facts["root"], config, axolotl_rules.AXOLOTL_HINTS)
        problems += _rule_problems(problems, axolotl_rules.axolotl_rules(config, gpus))
    elif engine is Engine.KOHYA:
        table = engine_table(engine)
        root = table.facts["roots"]["flux" if flux else "sdxl"]
        problems = check_keys(table, root, config, kohya_rules.KOHYA_HINTS)
        problems += _rule_problems(problems, kohya_rules.kohya_rules(config, gpus, flux))
    elif engine is Engine.AI_TOOLKIT:
        table = engine_table(engine)
        problems = check_keys(table, table.facts["root"], config, ai_toolkit_rules.AI_TOOLKIT_HINTS)
        problems += _rule_problems(problems, ai_toolkit_rules.ai_toolkit_rules(config, gpus))
    else:
        raise ValueError(f"{engine} has no configuration of its own: our own trainers read the plan")
    return [*problems, *find_secrets(config)]


def _rule_problems(known: list[Problem], rules: Iterable[Problem]) -> list[Problem]:
    """Rules rely on correct types: after a wrong one they may fail, and the known problems must do."""
    try:
        return list(rules)
    except (TypeError, ValueError, AttributeError, KeyError, ZeroDivisionError):
        if not known:
            raise
        return []
