"""The batch of a GRPO step: doubled while that trains more per second, and no further."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest

from core.data.facts import assumed_facts
from core.domain.choices import Engine, Method
from core.domain.tasks import TaskType
from core.models.identify import facts_from_name
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.planning.search.batch import CRITICAL_BATCH
from core.profile.resolve import load_profile, resolve_profile
from tests.core.planning.candidates import host, resolved
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


FEW, MANY = 1_200, 60_000


def small_plan(
    rows: int,
    task: TaskType = TaskType.INSTRUCT,
    gpus: str = "1xH100",
    limits: dict[str, Any] | None = None,
    **targets: Any,
) -> TrainingPlan:
    model, spec = facts_from_name("llama-1b", 10**9), TaskSpec(task_type=task, hours=4)
    wanted = {"effective_batch_size": 64, "learning_rate": 1e-4, "sample_packing": False, **targets}
    return plan_task(spec, model, assumed_facts(task, rows), host(gpus), resolved(limits, **wanted))


def test_the_batch_is_halved_until_the_steps_are_enough_and_the_rate_falls_by_its_root() -> None:
    before, plan = small_plan(FEW, num_epochs=3), small_plan(FEW, num_epochs=3, least_steps=200)
    assert before.batch.effective == 64
    assert before.steps.total < 100
    assert plan.batch.effective == 16
    assert plan.steps.total >= 200
    assert plan.steps.epochs == pytest.approx(before.steps.epochs, rel=0.05)
    [concession] = [each for each in plan.concessions if each.field == "effective_batch_size"]
    assert (concession.wanted, concession.got) == (64, 16)
    assert "too few" in concession.reason
    assert plan.optimizer.learning_rate == pytest.approx(1e-4 * math.sqrt(16 / 64))
    assert "√(16/64)" in plan.reasons["optimizer.learning_rate"].text


@pytest.mark.parametrize(
    ("rows", "given", "batch"),
    [
        (100, {"least_steps": 200}, 8),
        (100, {"least_steps": 200, "gpus": "4xH100"}, 8),
        (MANY, {"least_steps": 200, "num_epochs": 3}, 64),
        (60, {"least_steps": 10_000, "task": TaskType.GRPO}, 64),
    ],
    ids=["never below eight", "on four GPUs", "enough steps", "completions"],
)
def test_the_batch_is_halved_to_eight_at_least_and_only_where_steps_are_too_few(
    rows: int, given: dict[str, Any], batch: int
) -> None:
    plan = small_plan(rows, **{"num_epochs": 1, **given})
    assert plan.batch.effective == batch
    assert batch == 8 or plan.optimizer.learning_rate == 1e-4


@pytest.mark.parametrize("engine", [Engine.AXOLOTL, Engine.NATIVE])
def test_the_search_takes_its_share_of_the_training_time(engine: Engine) -> None:
    """The plan still ends before the reserve."""
    without = small_plan(MANY, num_epochs=500, engine=engine)
    plan = small_plan(MANY, num_epochs=500, engine=engine, lr_search_share=0.2)
    assert plan.lr_search.share == 0.2
    assert plan.steps.total == pytest.approx(0.8 * without.steps.total, rel=0.03)
    assert plan.time["search"] > 0
    assert plan.time.slack_s >= 0


@pytest.mark.parametrize("targets", [{"eval_metric": "loss"}, {"val_set_size": 0}], ids=str)
def test_no_search_without_held_out_rows_in_the_validators_metric(targets: dict[str, Any]) -> None:
    plan = small_plan(MANY, lr_search_share=0.2, **targets)
    assert plan.lr_search is None
    assert plan.time["search"] == 0


def test_the_search_keeps_to_the_limit_on_alpha_and_rate() -> None:
    targets = {"method": Method.LORA, "lora_alpha": 32, "lr_search_share": 0.1}
    assert small_plan(MANY, **targets).lr_search.highest is None
    bounded = small_plan(MANY, limits={"max_alpha_lr": 0.01}, **targets)
    assert bounded.lr_search.highest == pytest.approx(0.01 / (32 * 1e-4))
