"""A plan as files: the plan itself, what its engine reads, and how to start it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import core
from core.plan import TrainingPlan
from core.recipes.examples import example_inputs
from core.recipes.launchers import Launcher, script
from core.recipes.render import render
from core.recipes.run import Rendered


def rendered(plan: TrainingPlan) -> Rendered:
    """With example paths and columns: there is no task yet."""
    return render(plan, example_inputs(plan.task.task_type, plan.model.model_id))


def write_plan(
    plan: TrainingPlan,
    folder: Path,
    launcher: Launcher = Launcher.ACCELERATE,
    nodes: int = 1,
    python: str = "python",
) -> list[Path]:
    """Everything an attempt would get, and what starts it. Of a refused plan only the plan."""
    files = {"plan.json": plan.to_json() + "\n"}
    if plan.verdict.feasible:
        inputs = example_inputs(plan.task.task_type, plan.model.model_id)
        inputs = inputs.model_copy(update={"python": python})
        made = render(plan, inputs)
        source = str(Path(core.__file__).resolve().parents[1])
        name = "job.sbatch" if launcher is Launcher.SLURM else "run.sh"
        files |= {**made.files, name: script(launcher, plan, inputs, made, source, nodes)}
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in files.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


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
