"""Adapters on routed experts: planned where evaluations can load them, with what they cost and reach."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from core.data.facts import assumed_facts
from core.domain.choices import Engine, Method
from core.domain.tasks import TaskType
from core.models.identify import facts_from_name
from core.planning.candidate import candidate_of, vary
from core.planning.memory.activations import backward_layer, saved_activations
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.planning.time.speed import PassWork, step_time
from tests.core.planning.candidates import host, resolved
from tests.doubles.each import each

MIXTRAL, QWEN = "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B"
OTHER = "Qwen2-MoE"  # has shared layers with the names of its experts
LORA = {"method": Method.LORA, "lora_dropout": 0.0, "lora_r": 64}


def plan_of(
    targets: dict[str, Any],
    model: str = QWEN,
    gpus: str = "8xH200",
    task: TaskType = TaskType.INSTRUCT,
    limits: dict[str, Any] | None = None,
) -> TrainingPlan:
    data = assumed_facts(task, 20_000)
    profile = resolved(limits, **{**LORA, **targets})
    facts = facts_from_name(QWEN if model == OTHER else model)
    if model == OTHER:
        facts = facts.model_copy(update={"architecture": "qwen2_moe"})
    return plan_task(TaskSpec(task_type=task, hours=8), facts, data, host(gpus), profile)


def notes_of(plan: TrainingPlan) -> list[str]:
    return [note for note in plan.notes if "the adapter reaches" in note]


def test_experts_get_an_adapter_of_their_own_rank() -> None:
    without, plan = plan_of({}), plan_of({"lora_experts_r": 8})
    assert (without.adapter.expert_rank, plan.adapter.expert_rank) == (None, 8)
    per_layer = 128 * ((2048 + 2 * 768) + (768 + 2048))  # gate and up are one tensor
    assert plan.adapter.params - without.adapter.params == 8 * 48 * per_layer
    assert candidate_of(plan).adapter_params == plan.adapter.params
    assert "lora_target_modules" in {one.field for one in without.concessions}
    assert "lora_target_modules" not in {one.field for one in plan.concessions}


def test_a_lowered_rank_lowers_that_of_the_experts() -> None:
    plan = plan_of({"lora_experts_r": 64, "lora_r": 2048}, limits={"max_lora_r": 512})
    assert (plan.adapter.rank, plan.adapter.expert_rank) == (512, 16)
    over = plan_of({"lora_experts_r": 512, "lora_r": 64}, limits={"max_lora_r": 128})
    assert (over.adapter.rank, over.adapter.expert_rank) == (64, 128)


@each(
    ("model", "targets", "text"),
    [
        (QWEN, {}, "the adapter reaches 3.0% of the weights: routed experts are left out; lora_experts_r"),
        (MIXTRAL, {}, "the adapter reaches 2.9% of the weights: routed experts are left out; lora_experts_r"),
        (OTHER, {}, "of the weights: routed experts are left out"),
        (QWEN, {"lora_experts_r": 8}, "the adapter reaches 97.9% of the weights"),
        ("Qwen/Qwen2.5-7B", {"lora_target_modules": ["q_proj", "v_proj"]}, "reaches 5.4% of the weights"),
    ],
)
def test_a_plan_says_what_part_of_the_weights_the_adapter_reaches(
    model: str, targets: dict[str, Any], text: str
) -> None:
    (note,) = notes_of(plan_of(targets, model))
    assert text in note
    assert ("lora_experts_r" in text) is ("lora_experts_r" in note)


@each(
    ("model", "targets"),
    [("Qwen/Qwen2.5-7B", {}), ("Qwen/Qwen2.5-7B", {"lora_experts_r": 8}), (QWEN, {"method": "full"})],
)
def test_there_is_nothing_to_say_of_a_dense_model_or_a_full_fine_tune(
    model: str, targets: dict[str, Any]
) -> None:
    plan = plan_of(targets, model)
    assert notes_of(plan) == []
    assert "lora_experts_r" not in {one.field for one in plan.concessions}


@each(
    ("model", "targets", "reason"),
    [
        (OTHER, {}, "might not load"),
        (QWEN, {"engine": Engine.NATIVE}, "native trainer has none"),
        (QWEN, {"lora_dropout": 0.1}, "no place for lora_dropout"),
        (QWEN, {"dora": True}, "dora"),
        (QWEN, {"rslora": True}, "rslora"),
        (QWEN, {"lora_rank_pattern": {"q_proj": 8}}, "lora_rank_pattern"),
    ],
)
def test_where_it_might_not_load_there_is_none(model: str, targets: dict[str, Any], reason: str) -> None:
    plan = plan_of({"lora_experts_r": 8, **targets}, model)
    (concession,) = [one for one in plan.concessions if one.field == "lora_experts_r"]
    assert reason in concession.reason
    assert plan.adapter.expert_rank is None
    assert not candidate_of(plan).adapts_experts


def test_it_costs_the_layers_weights_twice_and_all_of_them_without_checkpointing() -> None:
    plain = vary(candidate_of(plan_of({})), micro=1)
    ours = replace(plain, shape=candidate_of(plan_of({"lora_experts_r": 8})).shape)
    layer = 128 * 3 * 768 * 2048
    assert backward_layer(ours) - backward_layer(plain) == pytest.approx(4 * layer, rel=0.05)
    kept = [saved_activations(vary(one, checkpointing=False)) for one in (ours, plain)]
    assert kept[0] - kept[1] == pytest.approx(2 * 48 * layer, rel=0.05)
    work = PassWork(4096, 512)
    assert step_time(vary(ours, checkpointing=True), work).seconds > step_time(plain, work).seconds + 0.1


@pytest.mark.parametrize("task", [TaskType.INSTRUCT, TaskType.DPO])
def test_four_bit_experts_are_made_anew_in_every_pass(task: TaskType) -> None:
    """Without checkpointing the weights of every layer would be kept in bf16."""
    plan = plan_of({"micro_batch_size": 1}, MIXTRAL, "1xH100", task)
    assert plan.method is Method.QLORA
    assert plan.precision.gradient_checkpointing
    assert plan.memory["dequantised"] == 2 * 8 * 3 * 4096 * 14336
