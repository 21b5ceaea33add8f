from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.domain.choices import Method
from core.domain.hardware import Hardware, parse_gpus
from core.domain.job_states import EndReason, StepFailed
from core.domain.keys import GpuReservation, ReservationKind, TaskKey
from core.domain.tasks import FileFormat, TaskType
from core.planning.conditions import JobConditions, LearnedBounds
from core.planning.oom import OutOfMemory, bounds_after_oom
from core.planning.plan import TaskSpec, TrainingPlan
from core.runs.remedies import NAN_RATE_FACTOR, AttemptFailure, workarounds_after
from miner.fleet.base import FleetSnapshot, InventoryState
from miner.inputs.fetch import FetchedInputs, JobTask
from miner.jobs import drafts
from miner.jobs.history import AttemptHistory
from tests.core.planning.candidates import on_all_gpus
from tests.miner.jobs.harness import MODEL, ROWS

INPUTS = FetchedInputs(model_path=None, data_path=None, model=MODEL, data=ROWS)  # type: ignore[arg-type]


PROFILE = on_all_gpus()


def request(hours: float = 1.0, *reasons: EndReason, **changes: Any) -> drafts.JobPlanRequest:
    hardware = Hardware(gpus=parse_gpus("4xH100"), cpu_cores=16, memory_bytes=64 * 10**9)
    asked = drafts.JobPlanRequest(
        TaskSpec(task_type=TaskType.INSTRUCT, hours=hours),
        INPUTS,
        PROFILE,
        lambda _plan: None,
        JobConditions(hardware),
    )
    for reason in reasons:
        without = workarounds_after(drafts.first_plan(asked), AttemptFailure(reason))
        asked = replace(asked, conditions=replace(asked.conditions, workarounds=without))
    return replace(asked, **changes)


def after_oom(plan: TrainingPlan, hours: float) -> TrainingPlan:
    bounds = bounds_after_oom(plan, OutOfMemory())
    assert bounds is not None
    return drafts.first_plan(request(hours, conditions=replace(plan.conditions, learned=bounds)))


def test_a_plan_is_made_for_what_there_is() -> None:
    plan = drafts.first_plan(request())
    counts = drafts.gpu_counts(plan, request())
    assert plan.verdict.feasible
    assert counts[0] == plan.gpus.count == 4
    assert list(counts) == sorted(counts, reverse=True)


@pytest.mark.parametrize("hours", [0.1, 0.01, 0.002])
def test_too_little_time_is_no_reason_to_train_nothing(hours: float) -> None:
    plan = drafts.first_plan(request(hours))
    assert plan.verdict.feasible
    assert plan.steps.total >= 1
    assert plan.time.deadline_s == pytest.approx(hours * 3600)
    assert plan.task.hours == hours
    assert "the deadline will cut it off" in plan.notes[-1]


def test_what_does_not_fit_in_memory_is_refused() -> None:
    huge = MODEL.model_copy(
        update={"params_total": 4 * 10**12, "params_active": 4 * 10**12, "layers": 200, "hidden": 40_000}
    )
    large = request(inputs=replace(INPUTS, model=huge))
    with pytest.raises(StepFailed) as failed:
        drafts.first_plan(large)
    assert failed.value.reason is EndReason.INFEASIBLE
    assert str(failed.value)


def test_what_was_learned_of_a_shape_bounds_its_next_plan() -> None:
    first = drafts.first_plan(request())
    asked: list[str] = []

    def lesson(plan: TrainingPlan) -> LearnedBounds:
        asked.append(drafts.lesson_key("5Validator", plan))
        return LearnedBounds(micro=2, slowness=3.0)

    second = drafts.first_plan(request(learned=lesson))
    assert second.batch.micro <= 2 < first.batch.micro
    assert second.time.step_s > first.time.step_s
    assert asked[0].startswith("5Validator/")


def test_nan_and_the_hosts_memory_change_the_next_plan() -> None:
    plain = drafts.first_plan(request())
    calm = drafts.first_plan(request(1.0, EndReason.NAN, EndReason.NAN))
    assert calm.optimizer.learning_rate == pytest.approx(plain.optimizer.learning_rate * NAN_RATE_FACTOR**2)
    lean = drafts.first_plan(request(1.0, EndReason.HOST_MEMORY))
    assert (lean.loader.workers, lean.loader.prefetch_factor) == (0, None)


def test_the_ladder_goes_on_when_the_estimate_says_that_there_is_no_time() -> None:
    first = drafts.first_plan(request(0.5))
    second = after_oom(first, 0.02)
    assert second.verdict.feasible
    assert second.steps.total >= 1
    assert second.batch.micro < first.batch.micro


def test_lessons_only_ever_get_stricter_and_slowness_follows_what_was_measured() -> None:
    plan = drafts.first_plan(request())
    smaller = after_oom(plan, 1.0)
    learned = drafts.lesson_of(smaller, LearnedBounds(micro=64), None)
    assert drafts.lesson_of(smaller, learned, None) is None, "nothing new"
    assert learned.micro == smaller.batch.micro
    slow = drafts.lesson_of(plan, LearnedBounds(slowness=2.0), plan.time.step_s * 1.5)
    assert slow.slowness == pytest.approx(3.0)
    assert drafts.lesson_of(plan, None, None) is None
    lesson = LearnedBounds()
    for factor in (1e-6, 1e6):
        once = drafts.lesson_of(plan, lesson, plan.time.step_s * factor)
        assert once.slowness in (0.5, 2.0), "one run does not decide over all that come after it"
    for _ in range(20):
        lesson = drafts.lesson_of(plan, lesson, plan.time.step_s * 1e6) or lesson
    assert lesson.slowness == 20.0


def test_gpus_that_were_requested_alone_are_planned_alone_though_the_neighbour_has_left() -> None:
    bounds = LearnedBounds(micro=1, checkpointing=True, length=256, method=Method.QLORA)
    asked = request()
    last = drafts.first_plan(replace(asked, conditions=replace(asked.conditions, learned=bounds)))
    neighbour = GpuReservation(TaskKey("5Other", "b"), ReservationKind.JOB, ("0",), 0.0, 9.0)
    history = AttemptHistory(2, (AttemptFailure(EndReason.OOM),), last, gpus=("0",))
    state = InventoryState()
    shared = drafts.DraftFacts(
        spec=asked.spec,
        inputs=INPUTS,
        history=history,
        profile=PROFILE,
        fleet=FleetSnapshot(state, (neighbour,), 0.0),
        reserved=(),
        task=JobTask(1, TaskType.INSTRUCT, "a/model", "", FileFormat.S3, Path()),
        learned=asked.learned,
    )
    hardware = asked.conditions.hardware
    drafted = drafts.first_plan(shared.request(hardware))
    assert drafted.launch.exclusive
    alone = drafts.with_draft(replace(shared, fleet=FleetSnapshot(state, (), 0.0)), drafted)
    granted = drafts.first_plan(alone.request(hardware))
    assert (granted.candidate, granted.launch.exclusive) == (drafted.candidate, True)
    lesson = drafts.lesson_of(granted, None, None)
    assert lesson is not None
    assert not {"exclusive", "effective_batch_size"} & {step.field for step in lesson.steps}
