"""Two plans for one task side by side: what a changed number does to configuration, memory and time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from core.plan import TrainingPlan
from miner.plan_files import flat, rendered


class Difference(NamedTuple):
    #: "configuration" (the engine's keys), "memory" (bytes of one GPU) or "time" (seconds).
    part: str
    what: str
    before: Any
    after: Any


def differences(before: TrainingPlan, after: TrainingPlan) -> list[Difference]:
    """From the engine's keys to the totals; nothing that stayed the same."""
    every = (*_configuration(before, after), *_memory(before, after), *_time(before, after))
    return [one for one in every if one.before != one.after]


def _configuration(before: TrainingPlan, after: TrainingPlan) -> Iterator[Difference]:
    there, here = _keys(before), _keys(after)
    for key in dict.fromkeys((*there, *here)):
        yield Difference("configuration", key, there.get(key), here.get(key))


def _keys(plan: TrainingPlan) -> dict[str, Any]:
    if not plan.verdict.feasible:
        return {}
    made = rendered(plan)
    gpus = {"gpus": str(plan.gpus), "micro batch × accumulation × GPUs": _batch(plan)}
    return {**gpus, **flat(made.config)}


def _batch(plan: TrainingPlan) -> str:
    return f"{plan.batch.micro} × {plan.batch.accumulation} × {plan.batch.world_size}"


def _memory(before: TrainingPlan, after: TrainingPlan) -> Iterator[Difference]:
    there = {term.name: term.bytes for term in before.memory.terms}
    here = {term.name: term.bytes for term in after.memory.terms}
    for name in dict.fromkeys((*there, *here)):
        yield Difference("memory", name, there.get(name, 0), here.get(name, 0))
    yield Difference("memory", "total", before.memory.total_bytes, after.memory.total_bytes)


def _time(before: TrainingPlan, after: TrainingPlan) -> Iterator[Difference]:
    there = {phase.name: phase.seconds for phase in before.time.phases}
    here = {phase.name: phase.seconds for phase in after.time.phases}
    for name in dict.fromkeys((*there, *here)):
        yield Difference("time", name, there.get(name, 0.0), here.get(name, 0.0))
    yield Difference("time", "total", before.time.total_s, after.time.total_s)
