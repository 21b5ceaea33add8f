"""What a run taught is kept for the next plan of its shape."""

from __future__ import annotations

from core.data_facts import assumed_facts
from core.model_facts import facts_from_name
from core.plan import TrainingPlan
from core.plan_parts import TaskSpec
from core.planning.learned import Learned, learned_from, shape_key
from core.planning.oom import OutOfMemory, next_after_oom
from core.planning.planner import plan
from core.planning.timing import Measured, recalibrate
from core.tasks import TaskType
from tests.core.planning.setups import host, resolved


def _plan(rows: int = 20_000, learned: Learned | None = None, rank: int = 16) -> TrainingPlan:
    return plan(
        TaskSpec(task_type=TaskType.INSTRUCT, hours=6),
        facts_from_name("meta-llama/Llama-3.2-3B"),
        assumed_facts(TaskType.INSTRUCT, rows),
        host("1xH100"),
        resolved(micro_batch_size=8, lora_r=rank),
        learned=learned,
    )


def test_the_next_plan_starts_where_the_ladder_ended() -> None:
    first = _plan()
    second = next_after_oom(first, OutOfMemory())
    assert second is not None
    again = _plan(rows=30_000, learned=learned_from(second))
    assert again.batch.micro <= second.batch.micro < first.batch.micro
    assert again.batch.effective == first.batch.effective


def test_a_measured_speed_replaces_the_prior() -> None:
    first = _plan()
    slow = Measured(steps_done=50, elapsed_s=900, step_s=first.time.step_s * 2)
    learned = learned_from(recalibrate(first, slow), first.time.step_s)
    assert learned.slowness == 2
    assert _plan(learned=learned).time.step_s == 2 * first.time.step_s


def test_nothing_learned_changes_nothing() -> None:
    assert _plan(learned=Learned()).digest == _plan().digest


def test_shapes_are_told_apart_by_what_memory_depends_on() -> None:
    assert shape_key(_plan(rows=1000)) == shape_key(_plan(rows=50_000))
    assert shape_key(_plan(rank=16)) != shape_key(_plan(rank=64))
