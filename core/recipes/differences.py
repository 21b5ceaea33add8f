"""Differences between two plans, down to the keys of the engine's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from core.planning.plan import TrainingPlan
from core.recipes.base import RenderedRun
from core.recipes.dry_run import example_inputs
from core.recipes.render import render


def render_example(plan: TrainingPlan) -> RenderedRun:
    """Render the plan with example paths and columns, as there is no task yet."""
    return render(plan, example_inputs(plan.task.task_type, plan.model.model_id))


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten to dotted paths; a list is one value."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            leaves |= flatten(value, f"{path}.")
        else:
            leaves[path] = value
    return leaves


class PlanDifference(NamedTuple):
    #: "configuration" (the engine's keys), "memory" (bytes of one GPU) or "time" (seconds).
    part: str
    what: str
    before: Any
    after: Any


def plan_differences(before: TrainingPlan, after: TrainingPlan) -> list[PlanDifference]:
    """Return what differs between two plans, from the engine's keys to the totals."""
    parts = (
        ("configuration", None, _engine_keys(before), _engine_keys(after)),
        ("memory", 0, _memory_bytes(before), _memory_bytes(after)),
        ("time", 0.0, _phase_seconds(before), _phase_seconds(after)),
    )
    return [
        PlanDifference(part, key, there.get(key, missing), here.get(key, missing))
        for part, missing, there, here in parts
        for key in sorted({**there, **here}, key="total".__eq__)  # last, after what only one plan has
        if there.get(key, missing) != here.get(key, missing)
    ]


def _engine_keys(plan: TrainingPlan) -> dict[str, Any]:
    if not plan.verdict.feasible:
        return {}
    made = render_example(plan)
    gpus = {"gpus": str(plan.gpus), "micro batch × accumulation × GPUs": _batch_words(plan)}
    return {**gpus, **flatten(made.config)}


def _batch_words(plan: TrainingPlan) -> str:
    return f"{plan.batch.micro} × {plan.batch.accumulation} × {plan.batch.world_size}"


def _memory_bytes(plan: TrainingPlan) -> dict[str, Any]:
    terms = {term.name: term.bytes for term in plan.memory.terms}
    return {**terms, "total": plan.memory.total_bytes}


def _phase_seconds(plan: TrainingPlan) -> dict[str, Any]:
    phases = {phase.name: phase.seconds for phase in plan.time.phases}
    return {**phases, "total": plan.time.total_s}
