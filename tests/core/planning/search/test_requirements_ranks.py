"""The share of the weights that an adapter reaches, and what experts cost in 4 bits."""

from __future__ import annotations

from typing import Any

import pytest

from core.data.facts import assumed_facts
from core.domain.choices import Method
from core.domain.tasks import TaskType
from core.models.identify import facts_from_name
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from tests.core.planning.candidates import host, resolved
from tests.doubles.each import each

MIXTRAL, QWEN = "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B"
LORA = {"method": Method.LORA, "lora_dropout": 0.0, "lora_r": 64}


def plan_of(
    targets: dict[str, Any],
    model: str = QWEN,
    gpus: str = "8xH200",
    task: TaskType = TaskType.INSTRUCT,
) -> TrainingPlan:
    data = assumed_facts(task, 20_000)
    profile = resolved(**{**LORA, **targets})
    return plan_task(TaskSpec(task_type=task, hours=8), facts_from_name(model), data, host(gpus), profile)


def notes_of(plan: TrainingPlan) -> list[str]:
    return [note for note in plan.notes if "the adapter reaches" in note]


@each(
    ("model", "targets", "text"),
    [
        (QWEN, {}, "the adapter reaches 3.0% of the weights: routed experts are left out"),
        (MIXTRAL, {}, "the adapter reaches 2.9% of the weights: routed experts are left out"),
        ("Qwen/Qwen2.5-7B", {"lora_target_modules": ["q_proj", "v_proj"]}, "reaches 5.4% of the weights"),
    ],
)
def test_a_plan_says_what_part_of_the_weights_the_adapter_reaches(
    model: str, targets: dict[str, Any], text: str
) -> None:
    (note,) = notes_of(plan_of(targets, model))
    assert text in note


@each(
    ("model", "targets"),
    [("Qwen/Qwen2.5-7B", {}), (QWEN, {"method": "full"})],
)
def test_there_is_nothing_to_say_of_a_dense_model_or_a_full_fine_tune(
    model: str, targets: dict[str, Any]
) -> None:
    assert notes_of(plan_of(targets, model)) == []


@pytest.mark.parametrize("task", [TaskType.INSTRUCT, TaskType.DPO])
def test_four_bit_experts_are_made_anew_in_every_pass(task: TaskType) -> None:
    """Without checkpointing the weights of every layer would be kept in bf16."""
    plan = plan_of({"micro_batch_size": 1}, MIXTRAL, "1xH100", task)
    assert plan.method is Method.QLORA
    assert plan.precision.gradient_checkpointing
    assert plan.memory["dequantised"] == 2 * 8 * 3 * 4096 * 14336
