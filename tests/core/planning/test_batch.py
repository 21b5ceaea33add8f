"""Small data: smaller steps instead of few, at a rate that fits them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from core.data_facts import assumed_facts
from core.hardware import Hardware, parse_gpus
from core.model_facts import facts_from_name
from core.plan import TrainingPlan
from core.plan_parts import TaskSpec
from core.planning.planner import plan
from core.profile import load_profile
from core.tasks import TaskType

FEW, MANY = 1_200, 60_000


def made(
    folder: Path, rows: int, targets: str, task: TaskType = TaskType.INSTRUCT, gpus: str = "1xH100"
) -> TrainingPlan:
    path = folder / "own.yaml"
    path.write_text(f"extends: base\ntargets: {{effective_batch_size: 64, learning_rate: 1e-4, {targets}}}\n")
    return plan(
        TaskSpec(task_type=task, hours=4),
        facts_from_name("llama-1b", 10**9),
        assumed_facts(task, rows),
        Hardware(gpus=parse_gpus(gpus)),
        load_profile(str(path)),
    )


def test_the_batch_is_halved_until_the_steps_are_enough(tmp_path: Path) -> None:
    before = made(tmp_path, FEW, "num_epochs: 3, sample_packing: false")
    found = made(tmp_path, FEW, "num_epochs: 3, sample_packing: false, least_steps: 200")
    assert before.batch.effective == 64
    assert before.steps.total < 100
    assert found.batch.effective == 16
    assert found.steps.total >= 200
    assert found.steps.epochs == pytest.approx(before.steps.epochs, rel=0.05)
    [given] = [one for one in found.concessions if one.field == "effective_batch_size"]
    assert (given.wanted, given.got) == (64, 16)
    assert "too few" in given.reason


def test_the_rate_falls_by_the_root_of_the_batch(tmp_path: Path) -> None:
    found = made(tmp_path, FEW, "num_epochs: 3, sample_packing: false, least_steps: 200")
    assert found.optimizer.learning_rate == pytest.approx(1e-4 * math.sqrt(16 / 64))
    assert "√(16/64)" in found.reasons["optimizer.learning_rate"].text


@pytest.mark.parametrize("gpus", ["1xH100", "4xH100"])
def test_never_below_eight_sequences(tmp_path: Path, gpus: str) -> None:
    found = made(tmp_path, 100, "num_epochs: 1, sample_packing: false, least_steps: 200", gpus=gpus)
    assert found.batch.effective == 8


def test_data_enough_are_left_alone(tmp_path: Path) -> None:
    found = made(tmp_path, MANY, "num_epochs: 3, least_steps: 200")
    assert found.batch.effective == 64
    assert found.optimizer.learning_rate == 1e-4


def test_completions_are_no_sequences(tmp_path: Path) -> None:
    found = made(tmp_path, 60, "num_epochs: 1, least_steps: 10000", TaskType.GRPO)
    assert found.batch.effective == 64


def test_the_search_has_its_time_and_the_training_the_rest(tmp_path: Path) -> None:
    """Its share is of the training time, and the plan still ends before the reserve."""
    without = made(tmp_path, MANY, "num_epochs: 500")
    found = made(tmp_path, MANY, "num_epochs: 500, lr_search_share: 0.2")
    assert found.lr_search is not None
    assert found.lr_search.share == 0.2
    assert found.steps.total == pytest.approx(0.8 * without.steps.total, rel=0.03)
    assert found.time["search"] > 0
    assert found.time.in_time


@pytest.mark.parametrize("targets", ["engine: native", "eval_metric: loss", "val_set_size: 0"])
def test_nothing_is_searched_without_rows_to_judge_by_or_by_an_engine_that_cannot(
    tmp_path: Path, targets: str
) -> None:
    found = made(tmp_path, MANY, f"lr_search_share: 0.2, {targets}")
    assert found.lr_search is None
    assert "search" not in [phase.name for phase in found.time.phases]


def test_the_search_keeps_to_the_limit_on_alpha_and_rate(tmp_path: Path) -> None:
    targets = "method: lora, lora_alpha: 32, lr_search_share: 0.1"
    free = made(tmp_path, MANY, targets)
    assert free.lr_search is not None
    assert free.lr_search.highest is None
    found = made(tmp_path, MANY, targets + "}\nlimits: {max_alpha_lr: 0.01")
    assert found.lr_search is not None
    assert found.lr_search.highest == pytest.approx(0.01 / (32 * 1e-4))
