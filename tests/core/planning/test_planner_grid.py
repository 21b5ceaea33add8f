"""Hundreds of combinations, some in `make test`: plans say what they concede, and feasible ones render."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from core.data.facts import assumed_facts
from core.domain.tasks import ImageModelType, TaskType
from core.models.identify import facts_from_name
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.profile.resolve import load_profile, resolve_profile
from core.recipes.dry_run import example_inputs
from core.recipes.render import render
from tests.core.planning.candidates import host

MODELS = (
    "facebook/opt-125m",
    "meta-llama/Llama-3.2-1B",
    "Qwen/Qwen2.5-3B",
    "meta-llama/Llama-3.1-8B",
    "google/gemma-2-9b",
    "mistralai/Mixtral-8x7B-v0.1",
    "Qwen/Qwen2.5-32B",
    "meta-llama/Llama-3.1-70B",
)
HARDWARE = ("1xRTX-4090", "1xH100", "4xH100", "8xH100", "4xA100-SXM-40GB")
PROFILES = ("h100x4", "h100x4-strategy", "h100x8", "h100-fast", "steady")
LOADED = {name: load_profile(name) for name in PROFILES}
HOURS = (1.0, 4.5)
TEXT = tuple(task for task in TaskType if task.is_text)
#: Prime to the number of hours, machines, models and profiles, so that a part has something of all.
EVERY = 7 if os.environ.get("GOD_MINER_EXAMPLES", "few") == "few" else 1


class Entry(NamedTuple):
    profile: str
    task: TaskType
    plan: TrainingPlan

    def __str__(self) -> str:
        plan = self.plan
        return f"{self.profile} {self.task.word} {plan.model.model_id} {plan.available} {plan.task.hours} h"


def _cases() -> Iterator[tuple[str, str, TaskType, str, float, ImageModelType | None]]:
    """Every task, model, profile and machine; hours and machines take turns so that the grid stays small."""
    machines = itertools.cycle(HARDWARE)
    for profile, task, model, hours in itertools.product(PROFILES, TEXT, MODELS, HOURS):
        yield profile, next(machines), task, model, hours, None
    for profile, kind, hours in itertools.product(PROFILES, ImageModelType, (1.0, 2.0)):
        yield profile, next(machines), TaskType.IMAGE, kind.value, hours, kind


def _entry(
    profile: str, hardware: str, task: TaskType, model: str, hours: float, image: ImageModelType | None
) -> Entry:
    spec = TaskSpec(task_type=task, hours=hours, image_type=image)
    data = assumed_facts(task, None if image else 20_000, image_type=image)
    plan = plan_task(spec, facts_from_name(model, None, image), data, host(hardware), LOADED[profile])
    return Entry(profile, task, plan)


@pytest.fixture(scope="module")
def grid() -> list[Entry]:
    return [_entry(*case) for case in itertools.islice(_cases(), 0, None, EVERY)]


@pytest.fixture(scope="module")
def feasible(grid: list[Entry]) -> list[Entry]:
    return [entry for entry in grid if entry.plan.verdict.feasible]


def test_the_grid_is_large_and_mostly_feasible(grid: list[Entry], feasible: list[Entry]) -> None:
    assert len(grid) * EVERY >= 300
    assert len(feasible) > 0.6 * len(grid)


def test_every_difference_from_the_profile_is_a_concession(feasible: list[Entry]) -> None:
    for entry in feasible:
        plan = entry.plan
        targets = resolve_profile(LOADED[entry.profile], entry.task, plan.model).targets
        effective = targets.effective_batch_size or (
            targets.micro_batch_size * targets.gradient_accumulation_steps * plan.batch.world_size
        )
        checkpointed = targets.gradient_checkpointing is False and plan.precision.gradient_checkpointing
        different = {
            "effective_batch_size": plan.batch.effective != effective,
            "lora_r": plan.adapter is not None and plan.adapter.rank != targets.lora_r,
            "optimizer": plan.optimizer.name is not targets.optimizer,
            "gradient_checkpointing": checkpointed,
            "method": targets.method not in (None, plan.method),
        }
        conceded = {concession.field for concession in plan.concessions}
        assert {field for field, differs in different.items() if differs} <= conceded, str(entry)
        if plan.steps.wanted is not None and plan.steps.total < plan.steps.wanted:
            assert {"num_epochs", "max_steps"} & conceded, str(entry)


def test_every_feasible_plan_renders(feasible: list[Entry]) -> None:
    for entry in feasible:
        assert render(entry.plan, example_inputs(entry.task)).command, str(entry)
