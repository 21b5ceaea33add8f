"""A plan as files: the plan itself, what its engine reads, and how to start it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.plan import TrainingPlan
from core.recipes.examples import example_inputs
from core.recipes.render import render
from core.recipes.run import Rendered


def rendered(plan: TrainingPlan) -> Rendered:
    """With example paths and columns: there is no task yet."""
    return render(plan, example_inputs(plan.task.task_type, plan.model.model_id))


def write_plan(plan: TrainingPlan, folder: Path) -> list[Path]:
    """Everything an attempt would get. Of a refused plan only the plan."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"plan.json": plan.to_json() + "\n"}
    if plan.verdict.feasible:
        made = rendered(plan)
        files |= {**made.files, "run.sh": _script(made)}
    written = []
    for name, text in files.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def _script(made: Rendered) -> str:
    env = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in sorted(made.env.items()))
    return f"#!/bin/sh\n# Paths are those of a run in its container.\n{env}exec {shlex.join(made.command)}\n"


def changes(made: Rendered) -> list[tuple[str, Any, Any]]:
    """What differs from the engine's template: (key, there, here)."""
    base, config = flat(made.base), flat(made.config)
    keys = [*base, *(key for key in config if key not in base)]
    return [(key, base.get(key), config.get(key)) for key in keys if base.get(key) != config.get(key)]


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """By dotted path; lists count as one value."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{path}.")
        else:
            found[path] = value
    return found
