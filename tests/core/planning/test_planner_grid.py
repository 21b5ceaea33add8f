"""Hundreds of combinations, some in `make test`: each plan holds or says why not, each promise renders."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import pytest

from core.data.facts import assumed_facts
from core.domain.choices import Engine
from core.domain.hardware import Hardware, parse_gpus
from core.domain.tasks import ImageModelType, TaskType
from core.engines.dry_run import example_inputs
from core.engines.render import render
from core.models.identify import facts_from_name
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.profile.resolve import load_profile, resolve_profile
from tests.core.engines.axolotl.engine import complaints

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
HOURS = (1.0, 4.5)
TEXT = tuple(task for task in TaskType if task.is_text)
#: Prime to the number of hours, machines, models and profiles, so that a part has something of all.
EVERY = 7 if os.environ.get("GOD_MINER_EXAMPLES", "few") == "few" else 1


class Entry(NamedTuple):
    profile: str
    hardware: str
    task: TaskType
    model: str
    hours: float
    plan: TrainingPlan


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
    facts = facts_from_name(model, None, image)
    spec = TaskSpec(task_type=task, hours=hours, image_type=image)
    data = assumed_facts(task, None if image else 20_000, image_type=image)
    gpus = Hardware(gpus=parse_gpus(hardware))
    return Entry(
        profile, hardware, task, model, hours, plan_task(spec, facts, data, gpus, load_profile(profile))
    )


@lru_cache(maxsize=1)
def grid() -> tuple[Entry, ...]:
    return tuple(_entry(*case) for case in itertools.islice(_cases(), 0, None, EVERY))


def _promised() -> list[Entry]:
    return [entry for entry in grid() if entry.plan.verdict.feasible]


def test_the_grid_is_large_and_mostly_feasible() -> None:
    assert len(grid()) * EVERY >= 300
    assert len(_promised()) > 0.6 * len(grid())


def test_a_refusal_names_its_code_and_its_number() -> None:
    for entry in grid():
        if not entry.plan.verdict.feasible:
            assert entry.plan.verdict.code is not None
            assert any(letter.isdigit() for letter in entry.plan.verdict.reason), entry


def test_no_feasible_plan_exceeds_the_memory_budget() -> None:
    for entry in _promised():
        assert entry.plan.memory.fits, entry[:5]
        assert entry.plan.memory.budget_bytes <= entry.plan.gpus.memory_bytes


def test_no_feasible_plan_runs_into_the_reserve() -> None:
    for entry in _promised():
        assert entry.plan.time.slack_s >= 0, entry[:5]


def test_the_effective_batch_is_kept_or_conceded() -> None:
    for entry in _promised():
        plan = entry.plan
        targets = resolve_profile(load_profile(entry.profile), entry.task, plan.model).targets
        asked = targets.effective_batch_size or (
            targets.micro_batch_size * targets.gradient_accumulation_steps * plan.batch.world_size
        )
        conceded = any(one.field == "effective_batch_size" for one in plan.concessions)
        assert plan.batch.effective == asked or conceded, entry[:5]


def test_every_difference_from_the_profile_is_a_concession() -> None:
    for entry in _promised():
        plan = entry.plan
        targets = resolve_profile(load_profile(entry.profile), entry.task, plan.model).targets
        conceded = {one.field for one in plan.concessions}
        if plan.adapter is not None and plan.adapter.rank != targets.lora_r:
            assert "lora_r" in conceded, entry[:5]
        if plan.optimizer.name is not targets.optimizer:
            assert "optimizer" in conceded, entry[:5]
        if targets.gradient_checkpointing is False and plan.precision.gradient_checkpointing:
            assert "gradient_checkpointing" in conceded, entry[:5]
        if targets.method is not None and plan.method is not targets.method:
            assert "method" in conceded, entry[:5]
        if plan.steps.wanted is not None and plan.steps.total < plan.steps.wanted:
            assert {"num_epochs", "max_steps"} & conceded, entry[:5]


def test_every_feasible_plan_renders_and_is_valid_for_its_engine() -> None:
    for entry in _promised():
        made = render(entry.plan, example_inputs(entry.task))
        assert made.command, entry[:5]


def test_plans_survive_json() -> None:
    for entry in grid()[::7]:
        assert TrainingPlan.from_json(entry.plan.to_json()) == entry.plan


def _card(plan: TrainingPlan) -> dict[str, Any]:
    """The engine is told of the GPUs of the plan."""
    major, minor = plan.gpus.kind.compute_capability
    return {
        "n_gpu": plan.gpus.count,
        "compute_capability": f"sm_{major}{minor}",
        "bf16": plan.gpus.kind.has_bf16,
        "tf32": (major, minor) >= (8, 0),
        "fp8": plan.gpus.kind.has_fp8,
    }


@pytest.mark.integration
def test_axolotl_itself_accepts_every_rendered_configuration(training_python: str) -> None:
    chosen = [entry for entry in _promised() if entry.plan.engine is Engine.AXOLOTL]
    asked = [(render(one.plan, example_inputs(one.task)).config, _card(one.plan)) for one in chosen]
    answers = complaints(training_python, asked)
    wrong = [(entry[:5], answer) for entry, answer in zip(chosen, answers, strict=True) if answer]
    assert len(chosen) * EVERY >= 150
    assert not wrong, wrong[:3]
