from __future__ import annotations

import pytest

from core.hardware import Hardware, parse_gpus
from core.plan import TrainingPlan
from core.plan_parts import TaskSpec
from core.planning.learned import Learned
from core.planning.oom import OutOfMemory
from core.remedies import CALMER
from core.tasks import TaskType
from miner.jobs import plans
from miner.jobs.ports import Fetched, StepFailed
from miner.jobs.states import EndReason
from tests.core.planning.setups import on_all_gpus
from tests.miner.jobs.house import MODEL, ROWS

INPUTS = Fetched(model_path=None, data_path=None, model=MODEL, data=ROWS)  # type: ignore[arg-type]


def ask(hours: float = 1.0, gpus: str = "4xH100", *history: EndReason) -> plans.Ask:
    hardware = Hardware(gpus=parse_gpus(gpus), cpu_cores=16, memory_bytes=64 * 10**9)
    return plans.Ask(TaskSpec(task_type=TaskType.INSTRUCT, hours=hours), INPUTS, hardware, history)


def nothing(_shape: str) -> Learned | None:
    return None


@pytest.fixture(scope="module")
def profile():  # type: ignore[no-untyped-def]
    return on_all_gpus()


def test_a_plan_is_made_for_what_there_is(profile) -> None:  # type: ignore[no-untyped-def]
    draft = plans.draft(ask(), profile, nothing)
    assert draft.plan.verdict.feasible
    assert draft.counts[0] == draft.plan.gpus.count == 4
    assert list(draft.counts) == sorted(draft.counts, reverse=True)


@pytest.mark.parametrize("hours", [0.1, 0.01, 0.002])
def test_too_little_time_is_no_reason_to_train_nothing(profile, hours: float) -> None:  # type: ignore[no-untyped-def]
    found = plans.first_plan(ask(hours), profile, nothing)
    assert found.verdict.feasible
    assert found.steps.total >= 1
    assert found.time.deadline_s == pytest.approx(hours * 3600)
    assert found.task.hours == hours
    assert "the clock ends it" in found.notes[-1]


def test_what_does_not_fit_in_memory_is_refused(profile) -> None:  # type: ignore[no-untyped-def]
    huge = MODEL.model_copy(
        update={"params_total": 4 * 10**12, "params_active": 4 * 10**12, "layers": 200, "hidden": 40_000}
    )
    large = plans.Ask(ask().spec, Fetched(None, None, huge, ROWS), ask().hardware)  # type: ignore[arg-type]
    with pytest.raises(StepFailed) as failed:
        plans.first_plan(large, profile, nothing)
    assert failed.value.reason is EndReason.INFEASIBLE
    assert str(failed.value)


def test_what_was_learned_of_a_shape_bounds_its_next_plan(profile) -> None:  # type: ignore[no-untyped-def]
    first = plans.first_plan(ask(), profile, nothing)
    asked: list[str] = []

    def lesson(plan: TrainingPlan) -> Learned:
        asked.append(plans.lesson_key("5Validator", plan))
        return Learned(micro=2, slowness=3.0)

    second = plans.first_plan(ask(), profile, lesson)
    assert second.batch.micro <= 2 < first.batch.micro
    assert second.time.step_s > first.time.step_s
    assert asked[0].startswith("5Validator/")


def test_nan_and_the_hosts_memory_change_the_next_plan(profile) -> None:  # type: ignore[no-untyped-def]
    plain = plans.first_plan(ask(), profile, nothing)
    calm = plans.first_plan(ask(1.0, "4xH100", EndReason.NAN, EndReason.NAN), profile, nothing)
    assert calm.optimizer.learning_rate == pytest.approx(plain.optimizer.learning_rate * CALMER**2)
    lean = plans.first_plan(ask(1.0, "4xH100", EndReason.HOST_MEMORY), profile, nothing)
    assert (lean.loader.workers, lean.loader.prefetch_factor) == (0, None)


def test_the_ladder_goes_on_when_the_estimate_says_that_there_is_no_time(profile) -> None:  # type: ignore[no-untyped-def]
    first = plans.first_plan(ask(0.5), profile, nothing)
    late = OutOfMemory(moment="train", elapsed_s=1700.0)
    second = plans.plan_after_oom(first, late)
    assert second.verdict.feasible
    assert second.steps.total >= 1
    assert second.batch.micro < first.batch.micro


def test_lessons_only_ever_get_stricter_and_slowness_follows_what_was_measured(profile) -> None:  # type: ignore[no-untyped-def]
    plan = plans.first_plan(ask(), profile, nothing)
    smaller = plans.plan_after_oom(plan, OutOfMemory())
    found = plans.lesson_of(smaller, Learned(micro=1, checkpointing=True), None)
    assert found is None, "nothing new"
    learned = plans.lesson_of(smaller, None, None)
    assert learned is not None
    assert learned.micro == smaller.batch.micro
    slow = plans.lesson_of(plan, Learned(slowness=2.0), plan.time.step_s * 1.5)
    assert slow is not None
    assert slow.slowness == pytest.approx(3.0)
    assert plans.lesson_of(plan, None, None) is None
    told = Learned()
    for factor in (1e-6, 1e6):
        once = plans.lesson_of(plan, told, plan.time.step_s * factor)
        assert once is not None
        assert once.slowness in (0.5, 2.0), "one run does not decide over all that come after it"
    for _ in range(20):
        told = plans.lesson_of(plan, told, plan.time.step_s * 1e6) or told
    assert told.slowness == 20.0


def test_the_first_steps_correct_the_time(profile) -> None:  # type: ignore[no-untyped-def]
    plan = plans.first_plan(ask(4.0), profile, nothing)
    slower = plans.measured_plan(plan, 10, 100.0, plan.time.step_s * 10 + 1.0, None)
    assert slower.time.measured
    assert slower.time.total_s >= 100.0
