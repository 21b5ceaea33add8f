"""Plans of environment tasks, on the machines that tournaments lend for them."""

from __future__ import annotations

import pytest

from core.data.facts import MADE_ROWS, assumed_facts, facts_from_lengths
from core.domain.choices import GpuStrategy, LrSchedule, Method
from core.domain.tasks import TaskType
from core.models.identify import facts_from_name
from core.planning.conditions import JobConditions
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.planning.search.gpu_count import tournament_count
from core.planning.time.overheads import making_rows_share
from core.profile.resolve import load_profile, resolve_profile
from tests.core.planning.candidates import host
from tests.doubles.each import each

HOURS = 1.5


def planned(
    name: str, gpus: str = "4xH100", hours: float = HOURS, made: bool = False, **facts: object
) -> TrainingPlan:
    """In a tournament's container, which uses all of its GPUs."""
    hardware, model = host(gpus), facts_from_name(name)
    profile = resolve_profile(load_profile("steady"), TaskType.ENVIRONMENT, model)
    targets = profile.targets.model_copy(update={"gpu_strategy": GpuStrategy.ALL})
    conditions = JobConditions(hardware, model_cached=True, publishes=False, rows_made=made)
    data = assumed_facts(TaskType.ENVIRONMENT).model_copy(update=facts)
    task = TaskSpec(task_type=TaskType.ENVIRONMENT, hours=hours)
    profile = profile.model_copy(update={"targets": targets})
    return plan_task(task, model, data, hardware, profile, conditions=conditions)


@each(("name", "noted"), [("Qwen/Qwen2.5-3B-Instruct", False), ("allenai/Olmo-3-7B-Instruct", True)])
def test_a_model_whose_tool_calls_nobody_reads_is_named(name: str, noted: bool) -> None:
    said = f"the evaluator reads no tool calls of {name}: every turn would be a forfeit"
    assert (said in planned(name).notes) is noted


@each(
    ("name", "method", "rate"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", Method.FULL, 5e-5),
        ("unsloth/Llama-3.2-3B-Instruct", Method.FULL, 5e-5),
        ("Qwen/Qwen3-4B-Instruct-2507", Method.LORA, 7e-5),
        ("Qwen/Qwen2.5-7B-Instruct", Method.LORA, 3.5e-5),
        ("unsloth/Meta-Llama-3.1-8B-Instruct", Method.LORA, 3.5e-5),
        ("Qwen/Qwen2.5-14B-Instruct", Method.LORA, 1e-4),
    ],
)
def test_size_decides_method_and_rate_and_every_step_has_128_rows(
    name: str, method: Method, rate: float
) -> None:
    plan = planned(name)
    assert plan.verdict.feasible, plan.verdict.reason
    assert (plan.method, plan.optimizer.learning_rate) == (method, rate)
    assert (plan.batch.effective, plan.batch.world_size, plan.sequence.packing) == (128, 4, False)
    assert plan.optimizer.warmup_steps == 35
    assert plan.optimizer.schedule is LrSchedule.COSINE
    assert plan.optimizer.min_lr_ratio == 0.25
    if method is Method.LORA:
        assert plan.adapter is not None
        assert (plan.adapter.rank, plan.adapter.alpha) == (256, 512)


@each("name", ["Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen2.5-7B-Instruct"])
def test_the_making_of_rows_has_its_share_of_the_time_until_they_are_made(name: str) -> None:
    before, after = planned(name), planned(name, made=True)
    share = making_rows_share(before.model.params_total)
    assert before.time["generate"] == share * HOURS * 3600
    assert after.time["generate"] == 0
    assert before.time.slack_s >= 0
    assert after.steps.total >= before.steps.total


def test_three_passes_are_the_most_and_the_clock_may_end_them_earlier() -> None:
    steps = [planned("Qwen/Qwen2.5-7B-Instruct", hours=hours).steps for hours in (0.75, 1.5, 6)]
    assert [one.total for one in steps] == sorted(one.total for one in steps)
    assert steps[0].epochs < 1
    assert steps[-1].epochs == 3
    assert steps[-1].total * 128 >= 2.99 * MADE_ROWS


def test_a_dataset_of_few_rows_has_enough_steps() -> None:
    """Repairs: 1,683 rows of 6,500 tokens, and no more can be made."""
    facts = facts_from_lengths(TaskType.ENVIRONMENT, [3000] * 1683, [3500] * 1683)
    plan = planned("Qwen/Qwen2.5-7B-Instruct", hours=2.5, total=facts.total, prompt=facts.prompt, rows=1683)
    assert plan.verdict.feasible, plan.verdict.reason
    assert plan.steps.total >= 100
    assert plan.steps.epochs == pytest.approx(3, rel=0.02)


def test_even_a_tenth_of_an_epoch_is_trained() -> None:
    plan = planned("Qwen/Qwen2.5-14B-Instruct", gpus="1xH100", hours=0.5)
    assert plan.verdict.feasible, plan.verdict.reason
    assert plan.steps.epochs < 0.1


def test_no_row_is_longer_than_the_sequences() -> None:
    lengths = [1000] * 999 + [3000]
    facts = facts_from_lengths(TaskType.ENVIRONMENT, lengths, [40] * 1000)
    plan = planned("Qwen/Qwen2.5-1.5B-Instruct", total=facts.total, prompt=facts.prompt, rows=1000)
    assert plan.sequence.length >= 3040
    assert plan.sequence.dropped_share == 0


def test_an_environment_gets_four_gpus_whatever_the_model() -> None:
    for name in ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-72B-Instruct"):
        assert tournament_count(facts_from_name(name), TaskType.ENVIRONMENT, kl=False)[0] == 4
