"""The batch of a GRPO step: doubled while that trains more per second, and no further."""

from __future__ import annotations

from functools import cache

from core.data.facts import assumed_facts
from core.domain.tasks import TaskType
from core.models.identify import facts_from_name
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.planning.search.batch import CRITICAL_BATCH
from core.profile.resolve import load_profile, resolve_profile
from tests.core.planning.candidates import host
from tests.doubles.each import each

HALF_B = "Qwen/Qwen2.5-0.5B"


@cache
def plan_of(
    model: str = HALF_B,
    gpus: str = "1xH100",
    hours: float = 1,
    rows: int = 20_000,
    batch: int | None = None,
    least_steps: int = 100,
) -> TrainingPlan:
    """Plan by `steady`; with `batch` set, a batch of that size."""
    facts, hardware = facts_from_name(model), host(gpus)
    profile = resolve_profile(load_profile("steady"), TaskType.GRPO, facts)
    update: dict[str, object] = {"least_steps": least_steps}
    if batch is not None:
        update |= {"effective_batch_size": batch, "grpo_most_batch": None}
    targets = profile.targets.model_copy(update=update)
    return plan_task(
        TaskSpec(task_type=TaskType.GRPO, hours=hours),
        facts,
        assumed_facts(TaskType.GRPO, rows),
        hardware,
        profile.model_copy(update={"targets": targets}),
    )


def prompts_per_second(plan: TrainingPlan) -> float:
    return plan.batch.effective / plan.targets.grpo_generations / plan.time.step_s


@each(
    ("model", "gpus", "hours"),
    [
        (HALF_B, "1xH100", 1),
        ("Qwen/Qwen2.5-1.5B", "1xH100", 2),
        ("Qwen/Qwen2.5-7B", "1xH100", 2),
        ("Qwen/Qwen2.5-7B", "4xH100", 2),
        ("Qwen/Qwen2.5-32B", "4xH100", 4),
        ("Qwen/Qwen2.5-1.5B", "1xL4", 4),
    ],
)
def test_the_batch_is_the_doubling_that_trains_most_in_the_time(model: str, gpus: str, hours: float) -> None:
    plan = plan_of(model, gpus, hours)
    first = plan_of(model, gpus, hours, batch=32).batch.effective
    others = [plan_of(model, gpus, hours, batch=first << n) for n in range(6) if first << n <= 1024]
    long_enough = [other for other in others if other.steps.total >= 100]

    def progress(other: TrainingPlan) -> float:
        batch = other.batch.effective
        return batch / (batch + CRITICAL_BATCH) / other.time.step_s

    assert plan.batch == max(long_enough, key=progress).batch


def test_half_a_billion_on_an_h100_answers_seven_times_the_prompts_of_32_completions() -> None:
    plan, small = plan_of(), plan_of(batch=32)
    assert (small.batch.effective, plan.batch.effective) == (32, 512)
    assert prompts_per_second(plan) > 6.5 * prompts_per_second(small)
    assert plan.prompt_coverage > 6 * small.prompt_coverage
    assert plan.steps.total >= 100
    assert plan.memory.total_bytes == small.memory.total_bytes, "passes are as large as before"
    said = next(one for one in plan.concessions if one.field == "effective_batch_size")
    assert (said.wanted, said.got) == (32, 512)
    assert "512 completions take 15.5 s, 32 6.74 s" in said.reason
    assert plan.optimizer.learning_rate == small.optimizer.learning_rate


def test_at_least_the_profiles_least_steps_remain() -> None:
    few, many = plan_of(), plan_of(least_steps=300)
    assert few.steps.total < 300 <= many.steps.total
    assert many.batch.effective == 128
    assert plan_of(least_steps=10_000).batch.effective == 32, "a short run is left as it was"


def test_prompts_that_run_out_before_the_hours_do_get_no_larger_steps() -> None:
    assert plan_of(hours=3, rows=300).batch.effective == 32


def test_a_cpu_keeps_the_profiles_batch() -> None:
    assert plan_of("org/tiny-llama-0.001b", "cpu").batch.effective == 32


def test_more_hours_never_make_the_training_smaller() -> None:
    for rows in (2_000, 20_000):
        epochs = [plan_of(hours=0.4 + 0.3 * step, rows=rows).steps.epochs for step in range(20)]
        assert epochs == sorted(epochs)
    assert epochs[-1] > 2
