"""An expert's checks of the plans of shipped profiles, over models and machines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import pytest

from core.data.facts import assumed_facts
from core.domain.tasks import TaskType
from core.models.identify import facts_from_name
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.profile.resolve import load_profile
from tests.core.planning.candidates import host

PROFILES = ("base", "h100x4", "h100x4-strategy", "h100x8", "h100-fast", "steady")
MODELS = (
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-1.5B",
    "Qwen/Qwen2.5-3B",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen2.5-14B",
    "Qwen/Qwen2.5-32B",
    "meta-llama/Llama-3.1-70B",
)
MACHINES = ("1xH100", "4xH100", "8xH100", "4xA100", "8xA100", "4xRTX-4090")
TASKS = (TaskType.INSTRUCT, TaskType.DPO, TaskType.GRPO)
LOADED = {name: load_profile(name) for name in PROFILES}
#: Of the GPU's peak, by the plan's own estimate, while it trains on rewards: the rest is generation.
LEAST_GRPO_UTILISATION = 0.025


@cache
def plan_of(profile: str, task: TaskType, model: str, gpus: str, rows: int = 20_000) -> TrainingPlan:
    facts = facts_from_name(model)
    hours = 1.0 if facts.params_total < 1e9 else 2.0 if facts.params_total < 10e9 else 5.0
    spec = TaskSpec(task_type=task, hours=hours)
    data = assumed_facts(task, rows)
    return plan_task(spec, facts, data, host(gpus), LOADED[profile], explained=False)


@pytest.fixture(scope="module")
def plans() -> list[tuple[str, TrainingPlan]]:
    def feasible() -> Iterator[tuple[str, TrainingPlan]]:
        for case in itertools.product(PROFILES, TASKS, MODELS, MACHINES):
            plan = plan_of(*case)
            if plan.verdict.feasible:
                profile, task, model, gpus = case
                yield f"{profile} {task.word} {model} {gpus}", plan

    return list(feasible())


def test_gpus_of_a_host_are_divided_evenly(plans: list[tuple[str, TrainingPlan]]) -> None:
    assert len(plans) > 600
    odd = [name for name, plan in plans if plan.available.per_node % plan.gpus.count]
    assert odd == []


def test_steps_have_the_rows_that_were_asked_for(plans: list[tuple[str, TrainingPlan]]) -> None:
    """Three GPUs would turn 32 rows into 33."""
    odd = [name for name, plan in plans if plan.batch.effective % 8]
    assert odd == []


def test_ranks_above_eight_are_multiples_of_eight(plans: list[tuple[str, TrainingPlan]]) -> None:
    ranks = {plan.adapter.rank: name for name, plan in plans if plan.adapter}
    assert {rank: name for rank, name in ranks.items() if rank > 8 and rank % 8} == {}
    assert len(ranks) > 15


def test_no_gpu_is_left_idle_by_small_grpo_steps_where_the_batch_is_ours_to_choose(
    plans: list[tuple[str, TrainingPlan]],
) -> None:
    """Other profiles keep their sources' numbers."""
    rewarded = [
        (name, plan) for name, plan in plans if plan.grpo and name.startswith(("steady ", "h100-fast "))
    ]
    slow = {
        name: plan.time.utilisation
        for name, plan in rewarded
        if plan.time.utilisation < LEAST_GRPO_UTILISATION and plan.steps.total < plan.steps.wanted
    }
    assert slow == {}
    assert len(rewarded) > 60


@pytest.mark.parametrize("task", [TaskType.INSTRUCT, TaskType.CHAT])
def test_the_profile_named_fast_is_the_fastest_by_its_own_estimate(task: TaskType) -> None:
    """Per GPU and second, padding left out, where the run is long enough to be compiled; else nearly. Pairs
    are not packed, and GRPO is not for its engine."""
    compiled = 0
    machines = [gpus for gpus in MACHINES if "H100" in gpus]
    for model, gpus, rows in itertools.product(MODELS, machines, (20_000, 100_000)):
        plans = {name: plan_of(name, task, model, gpus, rows) for name in PROFILES}
        speeds = {
            name: plan.time.throughput / plan.gpus.count
            for name, plan in plans.items()
            if plan.verdict.feasible
        }
        if "h100-fast" in speeds:
            is_compiled = plans["h100-fast"].precision.compile_mode is not None
            least = 1.0 if is_compiled else 0.85
            assert speeds["h100-fast"] >= least * max(speeds.values()), (model, gpus, rows, speeds)
            compiled += is_compiled
    assert compiled > 25


def test_the_profile_named_fast_packs_and_recomputes_only_for_memory() -> None:
    eight, seventy = (
        plan_of("h100-fast", TaskType.INSTRUCT, model, "4xH100", 100_000)
        for model in ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B")
    )
    assert (eight.sequence.packing, eight.precision.gradient_checkpointing) == (True, False)
    assert eight.time.throughput / eight.gpus.count > 9_000
    assert (seventy.sequence.packing, seventy.precision.gradient_checkpointing) == (True, True)
    assert min(eight.steps.total, seventy.steps.total) >= 200, "packed sequences hold several rows"
