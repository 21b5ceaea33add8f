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
from core.planning.gpu_count import GpuCountChoice, choose_counts, count_by_size, lane_for, tournament_count
from core.planning.plan import TaskSpec
from core.planning.requirements import Requirements, requirements_for
from core.profile.resolve import load_profile, resolve_profile
from core.profile.targets import GpuStep
from tests.core.planning.candidates import resolved
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


def _choice(available: int, **given: Any) -> GpuCountChoice:
    return choose_counts(_requirements(**given), available)


def test_auto_tries_the_fewest_first() -> None:
    assert _choice(4).counts == (1, 2, 3, 4)
    assert _choice(4).by_time


def test_all_takes_all_and_falls_back_to_fewer() -> None:
    assert _choice(4, gpu_strategy=GpuStrategy.ALL).counts == (4, 3, 2, 1)


def test_limits_bound_every_strategy() -> None:
    assert _choice(8, limits={"min_gpus": 2, "max_gpus": 4}).counts == (2, 3, 4)
    assert _choice(8, gpu_strategy=GpuStrategy.ALL, limits={"max_gpus": 4}).counts[0] == 4


@pytest.mark.parametrize(("model", "count"), [("x-8b", 1), ("x-40b", 2), ("x-72b", 4)])
def test_by_size_gives_seed_001s_counts(model: str, count: int) -> None:
    profile = load_profile("h100x4-strategy")
    facts = facts_from_name(model)
    targets = resolve_profile(profile, TaskType.INSTRUCT, facts).targets
    assert count_by_size(targets, facts)[0] == count


def test_by_size_is_written_by_the_operator() -> None:
    steps = [GpuStep(above="5B", gpus=3)]
    choice = _choice(4, gpu_strategy=GpuStrategy.BY_SIZE, gpus_by_size=steps)
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
    found = lane_for(resolve_profile(profile, TaskType.INSTRUCT, facts).targets, facts, TaskType.INSTRUCT)
    assert found[0] == lane


def test_a_lane_is_not_left_while_the_task_can_be_done_in_it() -> None:
    lanes = {"one": Lane(gpus=[0, 1])}
    choice = _choice(8, gpu_strategy=GpuStrategy.LANES, lanes=lanes)
    assert choice.fixed
    assert choice.counts[0] == 2


def test_a_task_without_a_lane_may_have_all_gpus() -> None:
    lanes = {"pictures": Lane(gpus=[0], task=["image"])}
    assert _choice(4, gpu_strategy=GpuStrategy.LANES, lanes=lanes).counts[0] == 4


def test_ai_toolkit_trains_on_one_gpu_whatever_is_there() -> None:
    choice = _choice(8, task=TaskType.IMAGE, gpu_strategy=GpuStrategy.ALL)
    assert choice.counts == (1,)
