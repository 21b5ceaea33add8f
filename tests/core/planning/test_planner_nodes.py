"""Several nodes: how many GPUs of them, how the model is shared out, what the network costs."""

from __future__ import annotations

from typing import Any

import pytest

from core.data.facts import assumed_facts
from core.domain.choices import GpuStrategy, Parallelism
from core.domain.hardware import Hardware, parse_gpus
from core.domain.tasks import ImageModelType, TaskType
from core.models.identify import facts_from_name
from core.planning.oom import OutOfMemory, next_after_oom
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from tests.core.planning.candidates import resolved


def _plan(
    gpus: str, model: str = "x-8b", task: TaskType = TaskType.INSTRUCT, hours: float = 8, **targets: Any
) -> TrainingPlan:
    image = None if task.is_text else ImageModelType.Z_IMAGE
    given = {"nodes": 2, "gpu_strategy": GpuStrategy.ALL, **targets}
    return plan_task(
        TaskSpec(task_type=task, hours=hours, image_type=image),
        facts_from_name(model, None, image),
        assumed_facts(task, 20_000, hours, image),
        Hardware(gpus=parse_gpus(gpus)),
        resolved(**given),
    )


def _nodes_conceded(plan: TrainingPlan) -> list[str]:
    return [str(each) for each in plan.concessions if each.field == "nodes"]


def test_a_job_takes_whole_nodes_up_to_the_profiles() -> None:
    plan = _plan("2x8xH100")
    assert (str(plan.gpus), plan.launch.processes, plan.launch.machines) == ("2x8xH100-SXM", 16, 2)
    assert not _nodes_conceded(plan)
    assert _plan("4x8xH100").gpus == plan.gpus
    assert _plan("2x8xH100", nodes=1).gpus.count == 8
    assert TrainingPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("task", [TaskType.GRPO, TaskType.IMAGE])
def test_what_trains_on_one_node_says_so(task: TaskType) -> None:
    plan = _plan("2x4xH100", task=task)
    assert plan.gpus.nodes == 1
    assert "trains on one node" in _nodes_conceded(plan)[0]


def test_where_one_node_is_there_it_is_planned_for_one_with_a_note() -> None:
    plan = _plan("8xH100")
    assert (plan.gpus.count, plan.launch.machines, plan.verdict.feasible) == (8, 1, True)
    assert _nodes_conceded(plan) == ["nodes 2 → 1: one node with such GPUs is there"]


def test_a_second_node_is_left_alone_where_the_strategy_needs_no_more_than_one() -> None:
    plan = _plan("2x8xH100", "x-1b", gpu_strategy=GpuStrategy.AUTO)
    assert plan.gpus.nodes == 1
    assert not _nodes_conceded(plan)


def test_the_model_is_sharded_within_a_node_if_it_fits_there_and_over_all_if_not() -> None:
    small = _plan("2x8xH100", "x-8b", fsdp_above=None)
    assert small.parallelism is Parallelism.DDP
    assert "25 Gbit/s between nodes" in small.reasons["parallelism"].text
    within = _plan("2x8xH100", "x-70b", fsdp_above=None)
    assert within.fsdp is not None
    assert within.fsdp.within_nodes
    assert "the 8 GPUs of each node" in within.reasons["parallelism"].text
    over_all = _plan("2x2xH100", "x-70b", fsdp_above=None, node_network=3200)
    assert over_all.fsdp is not None
    assert not over_all.fsdp.within_nodes
    assert within.memory.fits
    assert over_all.memory.fits


def test_a_slower_network_makes_the_steps_longer() -> None:
    times = [
        _plan("2x8xH100", "x-8b", method="full", node_network=rate).time.step_s for rate in (3200, 400, 25)
    ]
    assert times == sorted(times)
    assert times[0] < times[-1]


def test_the_host_of_each_node_serves_its_own_gpus() -> None:
    one, two = _plan("8xH100"), _plan("2x8xH100")
    assert two.container == one.container
    assert two.loader == one.loader


def test_after_running_out_of_memory_both_nodes_train_again() -> None:
    plan: TrainingPlan | None = _plan("2x2xH100", "x-70b", fsdp_above=None, node_network=3200)
    seen = 0
    while plan is not None and seen < 20:
        assert (plan.gpus.count, plan.launch.processes, plan.launch.machines) == (4, 4, 2)
        plan, seen = next_after_oom(plan, OutOfMemory(available=64)), seen + 1
    assert 1 < seen < 20


def test_a_job_on_one_of_two_nodes_grows_within_that_node() -> None:
    plan: TrainingPlan | None = _plan("2x4xH100", "x-70b", gpu_strategy=GpuStrategy.AUTO, nodes=1)
    counts = set()
    while plan is not None:
        counts.add(plan.gpus.count)
        assert plan.gpus.nodes == 1
        plan = next_after_oom(plan, OutOfMemory(available=8))
    assert max(counts) <= 4
