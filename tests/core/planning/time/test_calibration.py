"""Recalibration: the real speed decides, within the steps asked for and before the reserve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.data.facts import assumed_facts
from core.domain.choices import Engine
from core.domain.hardware import CPU, GpuSet
from core.domain.tasks import TaskType
from core.models.identify import facts_from_name
from core.planning.conditions import UNBOUNDED, JobConditions, LearnedBounds
from core.planning.oom import OutOfMemory, next_after_oom
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.planning.time.calibration import (
    ExpectedSpeed,
    MeasuredRun,
    expected_speed,
    flops_utilisation,
    recalibrate,
    shape_key,
)
from tests.core.builders import plan
from tests.core.planning.candidates import host, resolved


def _plan(
    rows: int = 20_000, learned: LearnedBounds = UNBOUNDED, hours: float = 6, **targets: Any
) -> TrainingPlan:
    return plan_task(
        TaskSpec(task_type=TaskType.INSTRUCT, hours=hours),
        facts_from_name("meta-llama/Llama-3.2-3B"),
        assumed_facts(TaskType.INSTRUCT, rows),
        host("1xH100"),
        resolved(**targets),
        conditions=JobConditions(host("1xH100"), learned=learned),
    )


#: More epochs than there is time for.
PLAN = _plan(30_000, hours=4, num_epochs=60)


def _after(new: TrainingPlan, factor: float, done: int = 50, **more: float) -> TrainingPlan:
    step = new.time.step_s * factor
    spent = sum(phase.seconds for phase in new.time.phases[:4])
    return recalibrate(new, MeasuredRun(steps_done=done, elapsed_s=spent + done * step, step_s=step, **more))


def test_a_slower_run_gets_fewer_steps_and_a_faster_one_more_but_never_more_than_were_asked_for() -> None:
    twice, half, far_less = (_after(PLAN, factor).steps.total for factor in (2.0, 0.5, 0.01))
    assert twice < PLAN.steps.total < half < far_less == PLAN.steps.wanted


def test_a_run_at_the_planned_speed_stays_within_five_percent() -> None:
    """The margin against steps that grow slower is the difference."""
    assert _after(PLAN, 1.0).steps.total == pytest.approx(PLAN.steps.total, rel=0.05)


@pytest.mark.parametrize("factor", [0.7, 1.3, 2.0])
def test_the_new_end_is_right_when_the_measured_speed_goes_on(factor: float) -> None:
    new = _after(PLAN, factor)
    real = new.time["so far"] + (new.steps.total - 50) * PLAN.time.step_s * factor
    rest = new.time["evaluate"] + new.time["save"] + new.time.phases[-1].seconds
    assert new.time.total_s == pytest.approx(real + rest, rel=1e-6)
    assert new.time.slack_s >= 0
    assert new.time.measured
    assert new.reasons["steps.total"].source == "measured"
    assert "measured after 50 steps" in new.reasons["steps.total"].text


def test_measured_evaluations_and_publishing_count() -> None:
    plain, slow = _after(PLAN, 1.0), _after(PLAN, 1.0, eval_s=600, publish_s=1200)
    assert slow.steps.total < plain.steps.total
    assert slow.time["publish"] == 1200
    assert slow.steps.eval_every >= plain.steps.eval_every


@given(
    st.floats(min_value=0.05, max_value=20), st.integers(0, 2000), st.floats(min_value=0, max_value=14_400)
)
def test_a_recalibrated_plan_is_sound(factor: float, done: int, elapsed: float) -> None:
    step = PLAN.time.step_s * factor
    new = recalibrate(PLAN, MeasuredRun(steps_done=done, elapsed_s=elapsed, step_s=step))
    assert new.steps.total >= done
    assert new.steps.save_every % new.steps.eval_every == 0
    assert new.steps.total == done or new.time.slack_s >= 0
    assert TrainingPlan.from_json(new.to_json()) == new


def test_the_next_plan_starts_where_the_ladder_ended() -> None:
    first = _plan()
    second = next_after_oom(first, OutOfMemory())
    assert second is not None
    again = _plan(rows=30_000, learned=second.conditions.learned.for_later_jobs())
    assert again.batch.micro <= second.batch.micro < first.batch.micro
    assert again.batch.effective == first.batch.effective


@pytest.mark.parametrize(
    ("bounds", "check"),
    [
        (LearnedBounds(length=640), lambda plan: plan.sequence.length == 640),
        (LearnedBounds(gpus=2), lambda plan: plan.verdict.code == "no_gpu"),
        (LearnedBounds(checkpointing=True), lambda plan: plan.precision.gradient_checkpointing),
    ],
    ids=["length", "gpus", "checkpointing"],
)
def test_every_bound_holds_for_the_next_plan(
    bounds: LearnedBounds, check: Callable[[TrainingPlan], bool]
) -> None:
    assert not check(_plan())
    assert check(_plan(learned=bounds))


def test_a_measured_speed_replaces_the_prior() -> None:
    assert _plan(learned=LearnedBounds(slowness=2)).time.step_s == 2 * _plan().time.step_s


def test_nothing_learned_changes_nothing() -> None:
    assert _plan(learned=LearnedBounds()).digest == _plan().digest


def test_the_shape_key_has_what_memory_depends_on() -> None:
    assert shape_key(_plan(rows=1000)) == shape_key(_plan(rows=50_000))
    assert shape_key(_plan(lora_r=16)) != shape_key(_plan(lora_r=64))


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
