"""Small data: smaller steps instead of few, at a rate that fits them; and the search for a rate."""

from __future__ import annotations

import math
from typing import Any

import pytest

from core.data.facts import assumed_facts
from core.domain.choices import Engine, Method
from core.domain.tasks import TaskType
from core.models.identify import facts_from_name
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from tests.core.planning.candidates import host, resolved

FEW, MANY = 1_200, 60_000


def plan_of(
    rows: int,
    task: TaskType = TaskType.INSTRUCT,
    gpus: str = "1xH100",
    limits: dict[str, Any] | None = None,
    **targets: Any,
) -> TrainingPlan:
    model, spec = facts_from_name("llama-1b", 10**9), TaskSpec(task_type=task, hours=4)
    wanted = {"effective_batch_size": 64, "learning_rate": 1e-4, "sample_packing": False, **targets}
    return plan_task(spec, model, assumed_facts(task, rows), host(gpus), resolved(limits, **wanted))


def test_the_batch_is_halved_until_the_steps_are_enough_and_the_rate_falls_by_its_root() -> None:
    before, plan = plan_of(FEW, num_epochs=3), plan_of(FEW, num_epochs=3, least_steps=200)
    assert before.batch.effective == 64
    assert before.steps.total < 100
    assert plan.batch.effective == 16
    assert plan.steps.total >= 200
    assert plan.steps.epochs == pytest.approx(before.steps.epochs, rel=0.05)
    [concession] = [each for each in plan.concessions if each.field == "effective_batch_size"]
    assert (concession.wanted, concession.got) == (64, 16)
    assert "too few" in concession.reason
    assert plan.optimizer.learning_rate == pytest.approx(1e-4 * math.sqrt(16 / 64))
    assert "√(16/64)" in plan.reasons["optimizer.learning_rate"].text


@pytest.mark.parametrize(
    ("rows", "given", "batch"),
    [
        (100, {"least_steps": 200}, 8),
        (100, {"least_steps": 200, "gpus": "4xH100"}, 8),
        (MANY, {"least_steps": 200, "num_epochs": 3}, 64),
        (60, {"least_steps": 10_000, "task": TaskType.GRPO}, 64),
    ],
    ids=["never below eight", "on four GPUs", "enough steps", "completions"],
)
def test_the_batch_is_halved_to_eight_at_least_and_only_where_steps_are_too_few(
    rows: int, given: dict[str, Any], batch: int
) -> None:
    plan = plan_of(rows, **{"num_epochs": 1, **given})
    assert plan.batch.effective == batch
    assert batch == 8 or plan.optimizer.learning_rate == 1e-4


@pytest.mark.parametrize("engine", [Engine.AXOLOTL, Engine.NATIVE])
def test_the_search_takes_its_share_of_the_training_time(engine: Engine) -> None:
    """The plan still ends before the reserve."""
    without = plan_of(MANY, num_epochs=500, engine=engine)
    plan = plan_of(MANY, num_epochs=500, engine=engine, lr_search_share=0.2)
    assert plan.lr_search.share == 0.2
    assert plan.steps.total == pytest.approx(0.8 * without.steps.total, rel=0.03)
    assert plan.time["search"] > 0
    assert plan.time.slack_s >= 0


@pytest.mark.parametrize("targets", [{"eval_metric": "loss"}, {"val_set_size": 0}], ids=str)
def test_no_search_without_held_out_rows_in_the_validators_metric(targets: dict[str, Any]) -> None:
    plan = plan_of(MANY, lr_search_share=0.2, **targets)
    assert plan.lr_search is None
    assert plan.time["search"] == 0


def test_the_search_keeps_to_the_limit_on_alpha_and_rate() -> None:
    targets = {"method": Method.LORA, "lora_alpha": 32, "lr_search_share": 0.1}
    assert plan_of(MANY, **targets).lr_search.highest is None
    bounded = plan_of(MANY, limits={"max_alpha_lr": 0.01}, **targets)
    assert bounded.lr_search.highest == pytest.approx(0.01 / (32 * 1e-4))
