"""Expected speed, MFU and efficiency agree with each other and with what the trainer's meter counts."""

from __future__ import annotations

import pytest

from core.domain.choices import Engine
from core.domain.hardware import CPU, GpuSet
from core.domain.tasks import TaskType
from core.planning.plan import TrainingPlan
from core.planning.time.calibration import (
    ExpectedSpeed,
    MeasuredRun,
    expected_speed,
    flops_utilisation,
    recalibrate,
)
from tests.core.builders import plan


def expected_of(plan: TrainingPlan) -> ExpectedSpeed:
    expected = expected_speed(plan)
    assert expected is not None
    return expected


def test_at_the_expected_speed_the_efficiency_is_one_whichever_way_it_is_computed() -> None:
    made = plan()
    expected = expected_of(made)
    assert expected.tokens_s is not None
    assert expected.mfu is not None
    assert expected.samples_s == pytest.approx(32 / 9.1)
    assert expected.tokens_s == pytest.approx(1024 * 32 / 9.1)  # padding included, as Axolotl computes it
    assert expected.efficiency(expected.tokens_s, None) == pytest.approx(1.0)
    slow = flops_utilisation(made, 0.6 * expected.tokens_s, None)
    assert slow is not None
    assert slow / expected.mfu == pytest.approx(0.6) == expected.efficiency(0.6 * expected.tokens_s, None)


def test_our_own_trainer_counts_no_padding_and_is_not_compared_with_it() -> None:
    assert expected_of(plan(engine=Engine.NATIVE)).tokens_s == plan().time.throughput


def test_a_cpu_has_an_efficiency_and_no_mfu() -> None:
    made = plan(gpus=GpuSet(kind=CPU, count=1))
    expected = expected_of(made)
    assert expected.mfu is None
    assert expected.efficiency(expected.tokens_s, None) == pytest.approx(1.0)


def test_rewards_are_compared_by_completions() -> None:
    task = plan().task.model_copy(update={"task_type": TaskType.GRPO})
    expected = expected_of(plan(task=task))
    assert expected.efficiency(10_000.0, None) is None
    assert expected.efficiency(None, 16 / 9.1) == pytest.approx(0.5)


def test_nothing_expected_or_nothing_measured_is_no_efficiency() -> None:
    unknown = plan(time=plan().time.model_copy(update={"step_s": 0.0}))
    assert expected_speed(unknown) is None
    assert expected_of(plan()).efficiency(None, 3.0) is None


def test_the_schedule_that_follows_a_measurement_does_not_change_the_plan_that_was_launched() -> None:
    made = plan()
    before = expected_speed(made)
    slower = recalibrate(made, MeasuredRun(steps_done=50, elapsed_s=900, step_s=18.2))
    assert slower.time.step_s != made.time.step_s
    assert expected_speed(made) == before
