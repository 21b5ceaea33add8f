"""After an attempt that ran out of memory: one step down, the batch kept, the time counted."""

from __future__ import annotations

import pytest

from core.data.facts import assumed_facts
from core.domain.choices import Method, Parallelism
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


def test_after_passes_that_a_rule_had_enlarged_those_of_the_plan_come_again() -> None:
    first = _plan()
    again = next_after_oom(first, OutOfMemory(grown_micro=8))
    assert (again.batch, again.memory.terms) == (first.batch, first.memory.terms)
    assert again.oom_steps == ("micro_batch_size 8 → 4",)
    assert next_after_oom(again, OutOfMemory()).batch.micro == 2
    assert next_after_oom(first, OutOfMemory(grown_micro=8, moment="evaluation")).batch.eval_micro == 2


def test_the_steps_come_in_their_order_each_in_less_memory_and_the_effective_batch_stays() -> None:
    plans = _ladder(_plan(gpus="4xH100", gpu_strategy="auto"), shared_gpus=True, available=4)
    fields = [plan.oom_steps[-1].split()[0] for plan in plans[1:]]
    order = ["micro_batch_size", "gradient_checkpointing", "sequence_len", "exclusive", "gpus", "method"]
    assert set(fields) == set(order)
    before_gpus = [order.index(field) for field in fields[: fields.index("gpus")]]
    assert before_gpus == sorted(before_gpus)
    assert {plan.batch.effective for plan in plans} == {plans[0].batch.effective}
    peaks = [plan.memory.total_bytes for plan in plans]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0]
    assert (plans[0].launch.exclusive, plans[-1].launch.exclusive) == (False, True)
    last = plans[-1]
    assert (last.gpus.count, last.parallelism) == (4, Parallelism.FSDP), "more GPUs come with sharding"
    assert last.launch.processes == last.batch.world_size == 4


def test_a_4_bit_base_comes_late_and_only_where_it_can_be_trained() -> None:
    last = _ladder(_plan())[-1]
    assert (last.method, last.adapter is None) == (Method.QLORA, False)
    assert "method lora → qlora" in last.oom_steps[3:]
    shared_pairs = _ladder(_plan(TaskType.DPO, "4xH100", gpu_strategy="auto"), available=4)[-1]
    assert shared_pairs.method is Method.LORA or not shared_pairs.fsdp
    for plan in (_plan(engine="native"), _plan(gpus="cpu"), _plan(method="full"), _plan(TaskType.IMAGE)):
        assert _ladder(plan)[-1].method is plan.method


def test_an_evaluation_that_ran_out_evaluates_fewer_rows_at_once() -> None:
    first = _plan()
    assert first.batch.eval_micro > 1
    second = next_after_oom(first, OutOfMemory(moment="evaluation"))
    assert second.batch.eval_micro == first.batch.eval_micro // 2
    assert second.batch.micro == first.batch.micro


def test_sequences_are_not_cut_where_states_fill_the_memory() -> None:
    model, data = facts_from_name("meta-llama/Llama-3.1-8B"), assumed_facts(TaskType.INSTRUCT, 20_000)
    spec = TaskSpec(task_type=TaskType.INSTRUCT, hours=4)
    full = plan_task(spec, model, data, host("1xH100"), load_profile("steady"))
    assert full.adapter is None
    assert {plan.sequence.length for plan in _ladder(full)} == {full.sequence.length}


def test_grpo_keeps_complete_groups_at_every_step() -> None:
    first = _plan(TaskType.GRPO, "8xH100", gpu_strategy="auto", limits={"min_gpus": 2})
    for plan in _ladder(first, moment="generation", available=8):
        per_gpu = plan.batch.micro * plan.batch.accumulation
        assert per_gpu % plan.targets.grpo_generations == 0
        assert per_gpu >= plan.targets.grpo_generations * plan.batch.world_size


def test_generation_first_keeps_fewer_layers_then_none_then_fewer_completions_at_once_then_in_all() -> None:
    model, data = facts_from_name("Qwen/Qwen2.5-14B"), assumed_facts(TaskType.GRPO, 5000)
    spec, generation = TaskSpec(task_type=TaskType.GRPO, hours=8), OutOfMemory(moment="generation")
    whole = plan_task(spec, model, data, host("4xH100"), on_all_gpus())
    half = next_after_oom(whole, generation)
    none = next_after_oom(half, generation)
    waiting = next_after_oom(none, generation)
    assert waiting.oom_steps[:2] == ("grpo.whole_layers 48 → 24", "grpo.whole_layers 24 → 0")
    assert waiting.oom_steps[2] == "grpo.together 32 → 16"
    assert (waiting.grpo.together, waiting.batch) == (16, whole.batch)
    assert waiting.time.step_s > none.time.step_s, "one generation after the other"
    fewer = waiting
    while fewer.grpo.together > fewer.targets.grpo_generations:
        fewer = next_after_oom(fewer, generation)
    fewer = next_after_oom(fewer, generation)
    assert fewer.oom_steps[3:-1] == ("grpo.together 16 → 8", "grpo.together 8 → 4")
    assert fewer.oom_steps[-1].startswith("effective_batch_size")
    assert (whole.grpo.whole_layers, none.grpo.whole_layers) == (model.layers, 0) == (48, 0)
    assert none.batch == half.batch == whole.batch
    assert none.memory.total_bytes <= half.memory.total_bytes <= whole.memory.total_bytes
    assert none.time.step_s > 1.5 * whole.time.step_s
    assert half.time.step_s == pytest.approx((whole.time.step_s + none.time.step_s) / 2, rel=0.05)
    # Micro batches and checkpointing do not change what is generated.
    rest = _ladder(fewer, moment="generation")[1:]
    assert {plan.oom_steps[-1].split()[0] for plan in rest} <= {
        "effective_batch_size",
        "sequence_len",
        "method",
    }
    assert not any(plan.grpo.whole_layers for plan in rest)
    in_a_step = next_after_oom(whole, OutOfMemory(moment="train"))
    assert in_a_step.oom_steps[-1].startswith("micro_batch_size")


def test_a_model_sharded_after_oom_gathers_all_weights_to_generate_if_they_fit() -> None:
    first = _plan(TaskType.GRPO, "4xH100", gpu_strategy="auto", num_epochs=0.05)
    last = _ladder(first, available=4)[-1]
    assert (first.gpus.count, last.gpus.count) == (1, 4)
    assert last.parallelism is Parallelism.FSDP
    assert last.grpo.whole_layers == last.model.layers


def test_images_lose_pixels_last() -> None:
    last = _ladder(_plan(TaskType.IMAGE))[-1]
    assert last.image.resolution < 1024
    assert last.batch.micro == 1


def test_lost_time_shortens_what_is_left_and_without_any_a_retry_is_refused() -> None:
    first = _plan(num_epochs=50)
    early, late, too_late = (next_after_oom(first, OutOfMemory(), hours) for hours in (3.9, 2, 0.2))
    assert late.steps.total < early.steps.total
    assert late.time.slack_s >= 0
    assert late.time["download"] == 0
    assert (too_late.verdict.feasible, too_late.steps.total) == (False, 0)


@each("task", list(TaskType))
def test_every_step_is_a_valid_plan(task: TaskType) -> None:
    for plan in _ladder(_plan(task, "4xH100", gpu_strategy="auto"), available=4):
        assert TrainingPlan.from_json(plan.to_json()) == plan


def test_more_gpus_are_no_step_where_shards_cost_a_small_model_more_than_they_save() -> None:
    model, data = facts_from_name("facebook/opt-125m"), assumed_facts(TaskType.INSTRUCT, 800)
    spec = TaskSpec(task_type=TaskType.INSTRUCT, hours=2)
    first = plan_task(spec, model, data, host("2xRTX-3090"), resolved(gpu_strategy="auto"))
    steps = _ladder(first, available=2)
    assert {plan.gpus.count for plan in steps} == {1}
    assert all(plan.verdict.feasible for plan in steps)


def test_who_generates_nothing_takes_the_steps_of_a_training_whatever_it_says() -> None:
    first = _plan()
    after = next_after_oom(first, OutOfMemory(moment="generation"))
    assert after.oom_steps == ("micro_batch_size 4 → 2",)
    assert after.batch == next_after_oom(first, OutOfMemory()).batch
