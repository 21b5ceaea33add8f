"""How many GPUs: the strategies and their fallbacks."""

from __future__ import annotations

from typing import Any

import pytest

from core.data.facts import assumed_facts
from core.domain.choices import GpuStrategy
from core.domain.hardware import GPU_KINDS
from core.domain.selectors import Lane
from core.domain.tasks import ImageModelType, TaskType
from core.models.identify import facts_from_name
from core.planning.gpu_count import choose_counts, count_by_size, lane_for, tournament_count
from core.planning.plan import TaskSpec
from core.planning.planner import plan_task
from core.planning.requirements import Requirements, requirements_for
from core.profile.resolve import load_profile, resolve_profile
from core.profile.targets import GpuStep
from tests.core.planning.candidates import host, resolved
from tests.doubles.each import each


def _requirements(model: str = "x-8b", task: TaskType = TaskType.INSTRUCT, **given: Any) -> Requirements:
    image = ImageModelType.Z_IMAGE if not task.is_text else None
    facts = facts_from_name(model, None, image)
    spec = TaskSpec(task_type=task, hours=3, image_type=image)
    limits = given.pop("limits", None)
    profile = resolved(limits, **given)
    return requirements_for(
        spec, facts, assumed_facts(task, 1000, image_type=image), profile, GPU_KINDS["H100-SXM"]
    )


LANES, ALL = {"gpu_strategy": GpuStrategy.LANES}, {"gpu_strategy": GpuStrategy.ALL}


@each(
    ("available", "given", "counts"),
    [
        (4, {}, (1, 2, 4)),
        (8, {}, (1, 2, 4, 8)),
        (3, {}, (1, 2, 3)),  # what is left of a host
        (6, {}, (1, 2, 3, 4, 6)),
        (7, {}, (1, 2, 4, 7)),
        (8, {"limits": {"min_gpus": 2, "max_gpus": 4}}, (2, 4)),
        (8, {"limits": {"max_gpus": 3}}, (1, 2, 3)),  # as the operator says
        (8, {"limits": {"min_gpus": 5, "max_gpus": 6}}, (6,)),
        (4, ALL, (4, 2, 1)),
        (8, {**ALL, "limits": {"max_gpus": 4}}, (4, 2, 1)),
        (8, {**ALL, "task": TaskType.IMAGE}, (1,)),  # with ai-toolkit
        (4, {"gpu_strategy": GpuStrategy.TOURNAMENT}, (2, 4, 1)),
        (4, {**LANES, "lanes": {"pictures": Lane(gpus=[0], task=["image"])}}, (4, 2, 1)),
        (4, {**LANES, "lanes": {"one": Lane(gpus=[0, 1])}}, (2, 4, 1)),
        (4, {**LANES, "lanes": {"one": Lane(gpus=[0, 1, 2])}}, (3, 4, 2, 1)),
        (4, {**LANES, "lanes": {"one": Lane(gpus=[0, 1], gpus_per_job=1)}}, (1, 2, 4)),
    ],
)
def test_every_strategy_has_its_counts_in_their_order_within_the_limits(
    available: int, given: dict[str, Any], counts: tuple[int, ...]
) -> None:
    choice = choose_counts(_requirements(**given), available)
    assert choice.counts == counts
    assert choice.by_time is ("gpu_strategy" not in given)
    assert choice.fixed is (given.get("gpu_strategy") is GpuStrategy.LANES), "a lane is not left"


@pytest.mark.parametrize(("model", "count"), [("x-8b", 1), ("x-40b", 2), ("x-72b", 4)])
def test_by_size_gives_seed_001s_counts(model: str, count: int) -> None:
    profile = load_profile("h100x4-strategy")
    facts = facts_from_name(model)
    targets = resolve_profile(profile, TaskType.INSTRUCT, facts).targets
    assert count_by_size(targets, facts)[0] == count


def test_by_size_is_written_by_the_operator() -> None:
    steps = [GpuStep(above="5B", gpus=3)]
    choice = choose_counts(_requirements(gpu_strategy=GpuStrategy.BY_SIZE, gpus_by_size=steps), 4)
    assert choice.counts == (3, 4, 2, 1)
    assert "above 5B" in choice.why


@each(
    ("model", "task", "kl", "count"),
    [
        ("x-4b", TaskType.INSTRUCT, False, 1),
        ("x-8b", TaskType.INSTRUCT, False, 2),
        ("x-8b", TaskType.DPO, False, 4),
        ("x-7b", TaskType.GRPO, False, 4),
        ("x-14b", TaskType.DPO, False, 8),
        ("x-3b", TaskType.INSTRUCT, True, 2),
    ],
)
def test_tournaments_hand_out_machines_by_effective_size(
    model: str, task: TaskType, kl: bool, count: int
) -> None:
    assert tournament_count(facts_from_name(model), task, kl)[0] == count


@pytest.mark.parametrize(
    ("model", "lane"), [("x-3b", "small"), ("x-8b", "medium"), ("x-40b", "large"), ("x-72b", "xlarge")]
)
def test_seed_002s_lanes_take_models_by_size(model: str, lane: str) -> None:
    profile, facts = load_profile("h100x8"), facts_from_name(model)
    targets = resolve_profile(profile, TaskType.INSTRUCT, facts).targets
    assert lane_for(targets, facts, TaskType.INSTRUCT)[0] == lane


@pytest.mark.parametrize("strategy", [GpuStrategy.ALL, GpuStrategy.AUTO])
def test_no_gpu_is_left_out_because_more_would_fit_larger_passes(strategy: GpuStrategy) -> None:
    """Smaller passes pad less: seven GPUs in such could train more than eight in larger ones."""
    facts, task = facts_from_name("meta-llama/Llama-3.1-70B"), TaskType.DPO
    profile = resolve_profile(load_profile("steady"), task, facts)
    targets = profile.targets.model_copy(update={"gpu_strategy": strategy})
    profile = profile.model_copy(update={"targets": targets})
    plan = plan_task(
        TaskSpec(task_type=task, hours=2), facts, assumed_facts(task, 50_000), host("8xH100"), profile
    )
    assert plan.gpus.count == 8
