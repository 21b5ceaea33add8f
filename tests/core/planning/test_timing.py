"""Recalibration: the real speed decides, within the wish and before the reserve."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.data_facts import assumed_facts
from core.model_facts import facts_from_name
from core.plan import TrainingPlan
from core.plan_parts import TaskSpec
from core.planning.planner import plan
from core.planning.timing import Measured, recalibrate
from core.tasks import TaskType
from tests.core.planning.setups import host, resolved


def _plan(hours: float = 4, epochs: float = 20, **targets: object) -> TrainingPlan:
    return plan(
        TaskSpec(task_type=TaskType.INSTRUCT, hours=hours),
        facts_from_name("meta-llama/Llama-3.1-8B"),
        assumed_facts(TaskType.INSTRUCT, 30_000),
        host("1xH100"),
        resolved(num_epochs=epochs, **targets),
    )


PLAN = _plan()


def _after(found: TrainingPlan, factor: float, done: int = 50, **more: float) -> TrainingPlan:
    step = found.time.step_s * factor
    spent = sum(phase.seconds for phase in found.time.phases[:4])
    return recalibrate(found, Measured(steps_done=done, elapsed_s=spent + done * step, step_s=step, **more))


def test_a_slower_run_gets_fewer_steps_and_a_faster_one_more() -> None:
    assert PLAN.steps.wanted is not None
    assert PLAN.steps.total < PLAN.steps.wanted
    totals = [_after(PLAN, factor).steps.total for factor in (2.0, 1.0, 0.5)]
    assert totals == sorted(totals)
    assert totals[0] < PLAN.steps.total < totals[2]


def test_never_more_than_was_wished_for() -> None:
    assert _after(PLAN, 0.01).steps.total == PLAN.steps.wanted


def test_a_run_at_the_planned_speed_stays_within_five_percent() -> None:
    """The margin against steps that grow slower is the difference."""
    assert _after(PLAN, 1.0).steps.total == pytest.approx(PLAN.steps.total, rel=0.05)


def test_the_new_end_is_right_when_the_measured_speed_goes_on() -> None:
    for factor in (0.7, 1.3, 2.0):
        found = _after(PLAN, factor)
        real = found.time["so far"] + (found.steps.total - 50) * PLAN.time.step_s * factor
        rest = found.time["evaluate"] + found.time["save"] + found.time.phases[-1].seconds
        assert found.time.total_s == pytest.approx(real + rest, rel=1e-6)
        assert found.time.in_time
        assert found.time.measured


def test_what_was_measured_of_evaluations_and_publishing_counts() -> None:
    plain = _after(PLAN, 1.0)
    slow = _after(PLAN, 1.0, eval_s=600, publish_s=1200)
    assert slow.steps.total < plain.steps.total
    assert slow.time["publish"] == 1200
    assert slow.steps.eval_every >= plain.steps.eval_every


def test_the_reason_tells_both_speeds() -> None:
    found = _after(PLAN, 2.0)
    reason = found.reasons["steps.total"]
    assert reason.source == "measured"
    assert "measured after 50 steps" in reason.text


def test_a_run_that_is_out_of_time_ends_now() -> None:
    found = recalibrate(PLAN, Measured(steps_done=80, elapsed_s=4 * 3600, step_s=1.0))
    assert found.steps.total == 80


@given(
    st.floats(min_value=0.05, max_value=20),
    st.integers(0, 2000),
    st.floats(min_value=0, max_value=14_400),
)
def test_a_recalibrated_plan_is_sound(factor: float, done: int, elapsed: float) -> None:
    step = PLAN.time.step_s * factor
    found = recalibrate(PLAN, Measured(steps_done=done, elapsed_s=elapsed, step_s=step))
    assert found.steps.total >= done
    assert found.steps.save_every % found.steps.eval_every == 0
    assert found.steps.total == done or found.time.in_time
    assert TrainingPlan.from_json(found.to_json()) == found
