"""After an attempt that ran out of memory: one rung down, the batch kept, the time counted."""

from __future__ import annotations

import pytest

from core.data.facts import assumed_facts
from core.domain.choices import Parallelism
from core.domain.tasks import ImageModelType, TaskType
from core.models.identify import facts_from_name
from core.planning.oom import OutOfMemory, next_after_oom
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.profile.resolve import load_profile
from tests.core.planning.candidates import host, on_all_gpus, resolved
from tests.doubles.each import each


def _plan(task: TaskType = TaskType.INSTRUCT, gpus: str = "1xH100", **targets: object) -> TrainingPlan:
    image = ImageModelType.FLUX if not task.is_text else None
    model = facts_from_name("meta-llama/Llama-3.2-3B", None, image)
    spec = TaskSpec(task_type=task, hours=4, image_type=image)
    data = assumed_facts(task, 20_000 if image is None else 30, image_type=image)
    return plan_task(spec, model, data, host(gpus), resolved(**{"micro_batch_size": 4, **targets}))


def _ladder(first: TrainingPlan, **failure: object) -> list[TrainingPlan]:
    plans = [first]
    while len(plans) < 40:
        following = next_after_oom(plans[-1], OutOfMemory.model_validate(failure))
        if following is None:
            return plans
        plans.append(following)
    raise AssertionError("the ladder has no end")


def test_first_the_micro_batch_is_halved_and_the_accumulation_doubled() -> None:
    first = _plan()
    second = next_after_oom(first, OutOfMemory())
    assert (second.batch.micro, second.batch.accumulation) == (2, 2 * first.batch.accumulation)
    assert second.oom_steps == ("micro_batch_size 4 → 2",)
    assert str(second.concessions[-1]) == "micro_batch_size 4 → 2: out of memory in train"


def test_the_steps_come_in_their_order_and_the_effective_batch_stays() -> None:
    plans = _ladder(_plan(gradient_checkpointing=None), shared_gpus=True, available=4)
    fields = [one.oom_steps[-1].split()[0] for one in plans[1:]]
    order = ["micro_batch_size", "gradient_checkpointing", "sequence_len", "exclusive", "gpus"]
    positions = [order.index(field) for field in fields]
    widened = positions.index(4)
    assert positions[:widened] == sorted(positions[:widened])
    assert set(fields) == set(order)
    assert {one.batch.effective for one in plans} == {plans[0].batch.effective}


def test_no_step_needs_more_memory_than_the_one_before() -> None:
    plans = _ladder(_plan(), available=4)
    peaks = [one.memory.total_bytes for one in plans]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0]


def test_more_gpus_come_with_sharding() -> None:
    last = _ladder(_plan(), available=4)[-1]
    assert last.gpus.count == 4
    assert last.parallelism is Parallelism.FSDP
    assert last.launch.processes == last.batch.world_size == 4


def test_an_evaluation_that_ran_out_evaluates_fewer_rows_at_once() -> None:
    first = _plan()
    assert first.batch.eval_micro > 1
    second = next_after_oom(first, OutOfMemory(moment="evaluation"))
    assert second.batch.eval_micro == first.batch.eval_micro // 2
    assert second.batch.micro == first.batch.micro


def test_gpus_are_made_exclusive_before_others_are_taken() -> None:
    plans = _ladder(_plan(), shared_gpus=True)
    assert plans[-1].launch.exclusive
    assert not plans[0].launch.exclusive


def test_sequences_are_not_cut_where_states_fill_the_memory() -> None:
    profile = load_profile("steady")
    model = facts_from_name("meta-llama/Llama-3.1-8B")
    spec = TaskSpec(task_type=TaskType.INSTRUCT, hours=4)
    full = plan_task(spec, model, assumed_facts(TaskType.INSTRUCT, 20_000), host("1xH100"), profile)
    assert full.adapter is None
    lengths = {one.sequence.length for one in _ladder(full)}
    assert lengths == {full.sequence.length}


def test_grpo_keeps_complete_groups_at_every_step() -> None:
    for one in _ladder(_plan(TaskType.GRPO, "2xH100"), moment="generation", available=8):
        batch = one.batch
        assert batch.micro * batch.accumulation % one.grpo.generations == 0
        assert batch.micro * batch.accumulation >= one.grpo.generations * batch.world_size


def test_generation_first_keeps_fewer_layers_then_none_then_makes_fewer_completions() -> None:
    model, data = facts_from_name("Qwen/Qwen2.5-14B"), assumed_facts(TaskType.GRPO, 5000)
    spec = TaskSpec(task_type=TaskType.GRPO, hours=8)
    first = plan_task(spec, model, data, host("4xH100"), on_all_gpus())
    assert first.grpo.whole_layers == model.layers == 48
    half = next_after_oom(first, OutOfMemory(moment="generation"))
    assert half.oom_steps == ("grpo.whole_layers 48 → 24",)
    second = next_after_oom(half, OutOfMemory(moment="generation"))
    assert second.oom_steps[1:] == ("grpo.whole_layers 24 → 0",)
    assert second.grpo.whole_layers == 0
    assert second.batch == half.batch == first.batch
    assert second.memory.total_bytes <= half.memory.total_bytes <= first.memory.total_bytes
    assert second.time.step_s > 1.5 * first.time.step_s
    assert half.time.step_s == pytest.approx((first.time.step_s + second.time.step_s) / 2, rel=0.05)
    third = next_after_oom(second, OutOfMemory(moment="generation"))
    assert third.oom_steps[-1].startswith("effective_batch_size")
    # Micro batches and checkpointing do not change what is generated; more GPUs do, with no gathered layers.
    rest = _ladder(third, moment="generation", available=8)[1:]
    assert {one.oom_steps[-1].split()[0] for one in rest} <= {"effective_batch_size", "sequence_len", "gpus"}
    assert rest[-1].gpus.count == 8
    assert not any(one.grpo is None or one.grpo.whole_layers for one in rest)
    in_a_step = next_after_oom(first, OutOfMemory(moment="train"))
    assert in_a_step.oom_steps[-1].startswith("micro_batch_size")


def test_a_model_sharded_after_oom_gathers_all_weights_to_generate_if_they_fit() -> None:
    last = _ladder(_plan(TaskType.GRPO, "1xH100"), available=4)[-1]
    assert last.parallelism is Parallelism.FSDP
    assert last.grpo.whole_layers == last.model.layers


def test_images_lose_pixels_last() -> None:
    last = _ladder(_plan(TaskType.IMAGE))[-1]
    assert last.image.resolution < 1024
    assert last.batch.micro == 1


def test_lost_time_shortens_what_is_left() -> None:
    first = _plan(num_epochs=50)
    early = next_after_oom(first, OutOfMemory(elapsed_s=100))
    late = next_after_oom(first, OutOfMemory(elapsed_s=7200))
    assert late.steps.total < early.steps.total
    assert late.time.slack_s >= 0
    assert late.time["download"] == 0
    assert late.time["so far"] == 7200


def test_a_retry_without_time_is_refused() -> None:
    late = next_after_oom(_plan(), OutOfMemory(elapsed_s=4 * 3600 - 700))
    assert not late.verdict.feasible
    assert late.steps.total == 0


@each("task", list(TaskType))
def test_every_step_is_a_valid_plan(task: TaskType) -> None:
    for one in _ladder(_plan(task), available=4, elapsed_s=300):
        assert TrainingPlan.from_json(one.to_json()) == one
