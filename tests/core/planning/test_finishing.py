"""The end of a text training: when a plan has it, and what time it takes."""

from __future__ import annotations

from typing import Any

import pytest

from core.data.facts import assumed_facts
from core.domain.tasks import TaskType
from core.models.identify import facts_from_name
from core.planning.finishing import out_every, stretch_steps
from core.planning.oom import OutOfMemory, next_after_oom
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.planning.time.calibration import MeasuredRun, recalibrate
from tests.core.planning.candidates import host, resolved
from tests.core.planning.test_planner_batch import MANY, plan_of
from tests.doubles.each import each

ASKED: dict[str, Any] = {"soup_members": 8, "last_stretch_rate": 0.25}


def end_of(plan: TrainingPlan) -> list[str]:
    names = [phase.name for phase in plan.time.phases]
    return names[names.index("save") + 1 :]


def test_means_and_held_out_rows_have_phases_of_their_own_before_publishing() -> None:
    plan = plan_of(MANY, num_epochs=3, **ASKED)
    assert plan.soup is not None
    assert plan.last_stretch is not None
    assert (plan.soup.members, plan.last_stretch.rate) == (8, 0.25)
    assert end_of(plan) == ["soup", "last stretch", "publish"]
    assert plan.time["soup"] > 0 < plan.time["last stretch"]
    assert plan.time.slack_s >= 0


def test_they_take_their_time_from_the_steps_and_at_most_their_shares() -> None:
    without, plan = plan_of(MANY, num_epochs=500), plan_of(MANY, num_epochs=500, **ASKED)
    given_up = (without.steps.total - plan.steps.total) * plan.time.step_s
    kept = plan.time["soup"] + plan.time["last stretch"]
    assert given_up == pytest.approx(kept, abs=2 * plan.time.step_s)
    slow = plan_of(MANY, num_epochs=500, val_rows_max=20_000, val_set_size=0.3, **ASKED)
    assert slow.time["soup"] <= 0.05 * slow.time.deadline_s
    assert slow.time["last stretch"] <= 0.1 * slow.time.deadline_s


@each(
    ("targets", "parts"),
    [
        ({}, ["publish"]),
        ({"soup_members": 1}, ["publish"]),
        ({**ASKED, "task": TaskType.GRPO}, ["publish"]),
        ({**ASKED, "val_set_size": 0}, ["publish"]),
        ({**ASKED, "val_rows_max": 63}, ["soup", "publish"]),
        ({**ASKED, "eval_metric": "loss"}, ["soup", "publish"]),
        ({**ASKED, "engine": "native"}, ["soup", "last stretch", "publish"]),
        ({**ASKED, "task": TaskType.DPO}, ["soup", "last stretch", "publish"]),
    ],
)
def test_only_what_can_be_judged_on_held_out_rows_has_them(targets: dict[str, Any], parts: list[str]) -> None:
    plan = plan_of(MANY, num_epochs=3, **targets)
    assert end_of(plan) == parts
    assert (plan.soup is not None, plan.last_stretch is not None) == (
        "soup" in parts,
        "last stretch" in parts,
    )


def test_a_stretch_that_a_short_training_has_too_few_rows_for_costs_no_steps() -> None:
    def short(**targets: Any) -> TrainingPlan:
        spec, model = (
            TaskSpec(task_type=TaskType.INSTRUCT, hours=0.5),
            facts_from_name("llama-70b", 70 * 10**9),
        )
        wanted = {"effective_batch_size": 64, "learning_rate": 1e-4, "sample_packing": False, "max_steps": 6}
        data = assumed_facts(TaskType.INSTRUCT, 20_000)
        return plan_task(spec, model, data, host("1xH100"), resolved(None, **wanted, **targets))

    plan = short(last_stretch_rate=0.25)
    assert plan.last_stretch is None
    assert plan.steps.eval_rows == 63
    assert plan.steps.total == short().steps.total == 4


def test_a_plan_that_is_corrected_on_the_way_keeps_their_time() -> None:
    plan = plan_of(MANY, num_epochs=500, **ASKED)
    kept = plan.time["soup"] + plan.time["last stretch"]
    step_s = 2 * plan.time.step_s
    measured = MeasuredRun(steps_done=10, elapsed_s=100.0, step_s=step_s)
    slower = recalibrate(plan, measured)
    assert slower.time["soup"] + slower.time["last stretch"] == kept
    # Measured by the trainer, what follows the steps is one sum.
    summed = recalibrate(plan, measured.model_copy(update={"publish_s": plan.time["publish"]}))
    assert (summed.steps.total - slower.steps.total) * step_s == pytest.approx(kept, rel=0.2, abs=2 * step_s)
    smaller = next_after_oom(plan, OutOfMemory(moment="train", elapsed_s=100.0))
    assert smaller is not None
    assert end_of(smaller) == ["soup", "last stretch", "publish"]


@each(("rows", "every"), [(0, 0), (63, 0), (64, 2), (100, 3), (160, 5), (1000, 5)])
def test_of_few_held_out_rows_more_stay_out_and_of_too_few_none_are_trained_on(rows: int, every: int) -> None:
    assert out_every(rows) == every


def test_a_pass_over_held_out_rows_has_their_share_of_an_epochs_steps() -> None:
    assert stretch_steps(1000, steps_per_epoch=100, training_rows=10_000) == 8
    assert stretch_steps(64, steps_per_epoch=10, training_rows=10_000) == 1
    assert stretch_steps(60, steps_per_epoch=10, training_rows=10_000) == 0
