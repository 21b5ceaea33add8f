"""Several nodes: how many GPUs of them, how the model is shared out, what the network costs."""

from __future__ import annotations

from typing import Any

import pytest

from core.data.facts import assumed_facts
from core.domain.choices import GpuStrategy, Parallelism
from core.domain.hardware import Hardware, parse_gpus
from core.domain.job_states import EndReason
from core.domain.tasks import ImageModelType, TaskType
from core.models.identify import facts_from_name
from core.planning.oom import OutOfMemory, next_after_oom
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.planning.time.calibration import shape_key
from core.runs.remedies import can_resume
from tests.core.planning.candidates import resolved


def _plan(
    gpus: str,
    model: str = "x-8b",
    task: TaskType = TaskType.INSTRUCT,
    hours: float = 8,
    limits: Any = None,
    **targets: Any,
) -> TrainingPlan:
    image = None if task.is_text else ImageModelType.Z_IMAGE
    given = {"nodes": 2, "gpu_strategy": GpuStrategy.ALL, **targets}
    return plan_task(
        TaskSpec(task_type=task, hours=hours, image_type=image),
        facts_from_name(model, None, image),
        assumed_facts(task, 20_000, hours, image),
        Hardware(gpus=parse_gpus(gpus)),
        resolved(limits, **given),
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


def test_what_is_sharded_within_nodes_is_sharded_over_all_before_sequences_become_shorter() -> None:
    plan: TrainingPlan | None = _plan("2x8xH100", "x-70b", fsdp_above=None)
    seen: list[TrainingPlan] = []
    while plan is not None:
        seen.append(plan)
        plan = next_after_oom(plan, OutOfMemory(available=64))
    within = [one.fsdp is not None and one.fsdp.within_nodes for one in seen]
    last = within.index(False)
    assert within == [True] * last + [False] * (len(seen) - last)
    assert seen[last].sequence.length == seen[0].sequence.length
    assert seen[last].memory.total_bytes < seen[last - 1].memory.total_bytes


def test_a_limit_of_gpus_below_two_nodes_is_a_concession() -> None:
    plan = _plan("2x8xH100", limits={"max_gpus": 12})
    assert (plan.gpus.count, plan.gpus.nodes) == (8, 1)
    assert _nodes_conceded(plan) == ["nodes 2 → 1: limits.max_gpus is 12"]


def test_what_two_nodes_teach_is_no_lesson_for_one() -> None:
    two, one = (
        _plan("2x8xH100", "x-70b", fsdp_above=None),
        _plan("2x8xH100", "x-70b", fsdp_above=None, nodes=1),
    )
    assert shape_key(two) != shape_key(one)
    assert "nodes" not in shape_key(one)


def test_a_checkpoint_of_other_shards_is_not_gone_on_from() -> None:
    one = _plan("16xH100", "x-70b", fsdp_above=None)
    two = _plan("2x8xH100", "x-70b", fsdp_above=None)
    assert one.batch.world_size == two.batch.world_size
    assert can_resume(two, two, EndReason.KILLED)
    assert not can_resume(one, two, EndReason.KILLED)
    assert not can_resume(two, one, EndReason.KILLED)
