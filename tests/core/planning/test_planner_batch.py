"""Small data: smaller steps instead of few, at a rate that fits them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from core.data.facts import assumed_facts
from core.domain.hardware import Hardware, parse_gpus
from core.domain.tasks import TaskType
from core.models.identify import facts_from_name
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.profile.resolve import load_profile

FEW, MANY = 1_200, 60_000


def plan_of(
    folder: Path, rows: int, targets: str, task: TaskType = TaskType.INSTRUCT, gpus: str = "1xH100"
) -> TrainingPlan:
    path = folder / "own.yaml"
    path.write_text(f"extends: base\ntargets: {{effective_batch_size: 64, learning_rate: 1e-4, {targets}}}\n")
    return plan_task(
        TaskSpec(task_type=task, hours=4),
        facts_from_name("llama-1b", 10**9),
        assumed_facts(task, rows),
        Hardware(gpus=parse_gpus(gpus)),
        load_profile(str(path)),
    )


def test_the_batch_is_halved_until_the_steps_are_enough(tmp_path: Path) -> None:
    before = plan_of(tmp_path, FEW, "num_epochs: 3, sample_packing: false")
    plan = plan_of(tmp_path, FEW, "num_epochs: 3, sample_packing: false, least_steps: 200")
    assert before.batch.effective == 64
    assert before.steps.total < 100
    assert plan.batch.effective == 16
    assert plan.steps.total >= 200
    assert plan.steps.epochs == pytest.approx(before.steps.epochs, rel=0.05)
    [concession] = [one for one in plan.concessions if one.field == "effective_batch_size"]
    assert (concession.wanted, concession.got) == (64, 16)
    assert "too few" in concession.reason


def test_the_rate_falls_by_the_root_of_the_batch(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, FEW, "num_epochs: 3, sample_packing: false, least_steps: 200")
    assert plan.optimizer.learning_rate == pytest.approx(1e-4 * math.sqrt(16 / 64))
    assert "√(16/64)" in plan.reasons["optimizer.learning_rate"].text


@pytest.mark.parametrize("gpus", ["1xH100", "4xH100"])
def test_never_below_eight_sequences(tmp_path: Path, gpus: str) -> None:
    plan = plan_of(tmp_path, 100, "num_epochs: 1, sample_packing: false, least_steps: 200", gpus=gpus)
    assert plan.batch.effective == 8


def test_large_data_keep_the_batch(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, MANY, "num_epochs: 3, least_steps: 200")
    assert plan.batch.effective == 64
    assert plan.optimizer.learning_rate == 1e-4


def test_the_batch_of_completions_is_not_halved(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 60, "num_epochs: 1, least_steps: 10000", TaskType.GRPO)
    assert plan.batch.effective == 64


def test_the_search_takes_its_share_of_the_training_time(tmp_path: Path) -> None:
    """Its share is of the training time, and the plan still ends before the reserve."""
    without = plan_of(tmp_path, MANY, "num_epochs: 500")
    plan = plan_of(tmp_path, MANY, "num_epochs: 500, lr_search_share: 0.2")
    assert plan.lr_search.share == 0.2
    assert plan.steps.total == pytest.approx(0.8 * without.steps.total, rel=0.03)
    assert plan.time["search"] > 0
    assert plan.time.slack_s >= 0


@pytest.mark.parametrize("targets", ["engine: native", "eval_metric: loss", "val_set_size: 0"])
def test_no_search_without_held_out_rows_or_in_an_engine_that_cannot(tmp_path: Path, targets: str) -> None:
    plan = plan_of(tmp_path, MANY, f"lr_search_share: 0.2, {targets}")
    assert plan.lr_search is None
    assert "search" not in [phase.name for phase in plan.time.phases]


def test_the_search_keeps_to_the_limit_on_alpha_and_rate(tmp_path: Path) -> None:
    targets = "method: lora, lora_alpha: 32, lr_search_share: 0.1"
    free = plan_of(tmp_path, MANY, targets)
    assert free.lr_search.highest is None
    plan = plan_of(tmp_path, MANY, targets + "}\nlimits: {max_alpha_lr: 0.01")
    assert plan.lr_search.highest == pytest.approx(0.01 / (32 * 1e-4))
