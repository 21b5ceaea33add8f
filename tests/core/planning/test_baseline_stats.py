"""The validator's statistics of a base model: what is read of them, and that nothing in them hurts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.data.facts import assumed_facts
from core.domain.choices import Method
from core.domain.tasks import TaskType
from core.planning.baseline_stats import (
    FASTEST,
    SLOWEST,
    BadStats,
    BaselineSpeed,
    BaselineStats,
    read_baseline_stats,
    slowness_of,
)
from core.planning.conditions import JobConditions
from core.planning.optimizer import HIGHEST_FIRST
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from tests.core import builders
from tests.core.planning.candidates import host, resolved
from tests.doubles.each import each

RMS = {"attention_qkv": 0.04, "attention_output": 0.02, "ffn_up": 0.03, "ffn_down": 0.03, "layer_norm": 1.0}
#: As a validator writes it; what is not read is left out.
THEIRS: dict[str, Any] = {
    "task_type": "instruct",
    "weights": {"by_group": {name: {"weight_rms": rms, "max_abs": 1.0} for name, rms in RMS.items()}},
    "training": {"init_loss": 2.1, "masked_completion_loss": 1.4},
    "throughput": {
        "tokens_per_sec": 9000.0,
        "seq_len": 1024,
        "micro_batch_size": 8,
        "n_gpus": 4,
        "gpu_name": "NVIDIA H100 80GB HBM3",
    },
}
SPEED = BaselineSpeed(tokens_s=9000, length=1024, micro=8, gpu="NVIDIA H100 80GB HBM3")


def written(folder: Path, content: Any) -> Path:
    path = folder / "baseline_stats_task_5Gabc.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_the_median_size_of_the_matrices_and_the_measured_speed_are_read(tmp_path: Path) -> None:
    stats = read_baseline_stats(written(tmp_path, THEIRS))
    assert stats == BaselineStats(weight_rms=0.03, speed=SPEED)


@each(
    "content",
    [
        *("", "[]", "null", "{", "[" * 100_000, '{"throughput": [1]}', "1" * 5000, "é"),
        {"throughput": None, "weights": {"by_group": None}},
        {"throughput": {**THEIRS["throughput"], "tokens_per_sec": -1}},
        {"throughput": {**THEIRS["throughput"], "seq_len": "1024"}},
        {"throughput": {**THEIRS["throughput"], "micro_batch_size": True}},
        {"throughput": {**THEIRS["throughput"], "gpu_name": 5}},
        {"throughput": {**THEIRS["throughput"], "tokens_per_sec": 10**400}},
        '{"weights": {"by_group": {"ffn_up": {"weight_rms": NaN}, "ffn_down": {"weight_rms": 1e999}}}}',
    ],
)
def test_what_makes_no_sense_is_as_if_it_were_not_there(tmp_path: Path, content: Any) -> None:
    with pytest.raises(BadStats):
        read_baseline_stats(written(tmp_path, content))


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=3), st.lists, max_leaves=5))
def test_any_value_may_stand_anywhere(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    content = {
        "weights": {"by_group": {"ffn_up": {"weight_rms": value}, "ffn_down": value}},
        "throughput": {**THEIRS["throughput"], "seq_len": value, "gpu_name": value},
    }
    for part in (content, {"weights": value, "throughput": value}, value):
        try:
            stats = read_baseline_stats(written(tmp_path_factory.getbasetemp(), part))
        except BadStats:
            continue
        assert stats.weight_rms or stats.speed


def test_a_folder_a_pipe_a_link_and_a_huge_file_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(written(tmp_path, THEIRS))
    (tmp_path / "huge").write_text(" " * 1_000_001)
    for name in ("missing", "pipe", "link", "huge", "."):
        with pytest.raises(BadStats):
            read_baseline_stats(tmp_path / name)


# — the speed


def test_a_gpu_half_as_fast_as_estimated_makes_steps_twice_as_long() -> None:
    plan = builders.plan()
    slowness = [
        slowness_of(plan, BaselineStats(speed=SPEED.model_copy(update={"tokens_s": tokens_s})))
        for tokens_s in (9000, 4500, 1e6, 1)
    ]
    assert slowness[0] is not None
    assert 0.6 < slowness[0] < 1
    assert slowness[1:] == [pytest.approx(2 * slowness[0]), FASTEST, SLOWEST]


@each("gpu", ["NVIDIA A100-SXM4-80GB", "something else", ""])
def test_a_speed_of_another_gpu_says_nothing(gpu: str) -> None:
    stats = BaselineStats(speed=SPEED.model_copy(update={"gpu": gpu}))
    assert slowness_of(builders.plan(), stats) is None
    assert slowness_of(builders.plan(), BaselineStats()) is None


# — the first rate


def searching(rms: float | None, task: TaskType = TaskType.INSTRUCT, **targets: Any) -> TrainingPlan:
    asked = {"method": Method.FULL, "lr_search_share": 0.1, "learning_rate": 2e-5, **targets}
    return plan_task(
        TaskSpec(task_type=task, hours=3),
        builders.llama_8b(),
        assumed_facts(task, 20_000),
        host("8xH100"),
        resolved(**asked),
        conditions=JobConditions(host("8xH100"), weight_rms=rms),
    )


def test_larger_weights_begin_at_a_higher_rate_and_smaller_ones_at_the_planned_one() -> None:
    """0.003 × 0.05 × √(1/8.03) is 5.3e-5."""
    plan = searching(0.05)
    assert plan.lr_search.first == pytest.approx(2.65, abs=0.01)
    assert plan.optimizer.learning_rate == 2e-5
    assert any("the search begins" in note for note in plan.notes)
    assert searching(0.5).lr_search.first == HIGHEST_FIRST
    assert searching(0.02).lr_search.first is None


@each(
    ("task", "targets"),
    [
        (TaskType.INSTRUCT, {"method": Method.LORA}),
        (TaskType.DPO, {}),
        (TaskType.INSTRUCT, {"lr_search_share": 0.0}),
    ],
)
def test_adapters_preferences_and_plans_without_a_search_are_left_alone(
    task: TaskType, targets: dict[str, Any]
) -> None:
    plan = searching(0.05, task, **targets)
    assert plan.lr_search == searching(None, task, **targets).lr_search
