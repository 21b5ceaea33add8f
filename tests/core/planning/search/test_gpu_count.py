"""How many GPUs: the strategies and their fallbacks."""

from __future__ import annotations

from typing import Any

import pytest

from core.data.facts import assumed_facts
from core.domain.choices import GpuStrategy, Parallelism
from core.domain.decisions import IDLE_HOST, TrainingWorth
from core.domain.selectors import Lane
from core.domain.tasks import ImageModelType, TaskType
from core.models.identify import facts_from_name
from core.planning.conditions import JobConditions
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.planning.search.gpu_count import choose_counts, count_by_size, lane_for, tournament_count
from core.planning.search.requirements import Requirements, requirements_for
from core.profile.resolve import load_profile, resolve_profile
from core.profile.targets import GpuStep
from core.recipes.dry_run import example_inputs
from core.recipes.render import render
from tests.core.planning.candidates import host, resolved
from tests.doubles.each import each


def _requirements(model: str = "x-8b", task: TaskType = TaskType.INSTRUCT, **given: Any) -> Requirements:
    image = ImageModelType.Z_IMAGE if not task.is_text else None
    facts = facts_from_name(model, None, image)
    spec = TaskSpec(task_type=task, hours=3, image_type=image)
    limits = given.pop("limits", None)
    profile = resolved(limits, **given)
    data = assumed_facts(task, 1000, image_type=image)
    return requirements_for(spec, facts, data, profile, JobConditions(host("8xH100-SXM")))


LANES, ALL = {"gpu_strategy": GpuStrategy.LANES}, {"gpu_strategy": GpuStrategy.ALL}
AUTO = {"gpu_strategy": GpuStrategy.AUTO}


@each(
    ("available", "given", "counts"),
    [
        (4, {}, (1, 2, 4)),
        (4, AUTO, (1, 2, 4)),
        (8, {}, (1, 2, 4, 8)),
        (3, {}, (1, 2, 3)),  # what is left of a host
        (6, {}, (1, 2, 3, 4, 6)),
        (7, {}, (1, 2, 4, 7)),
        (8, {"limits": {"min_gpus": 2, "max_gpus": 4}}, (2, 4)),
        (8, {"limits": {"max_gpus": 3}}, (1, 2, 3)),  # as the operator says
        (8, {"limits": {"min_gpus": 5, "max_gpus": 6}}, (6,)),
        (4, ALL, (4, 2, 1)),
        (8, {**ALL, "limits": {"max_gpus": 4}}, (4, 2, 1)),
        (8, {**ALL, "task": TaskType.IMAGE}, (1,)),  # with ai-toolkit
        (4, {"gpu_strategy": GpuStrategy.TOURNAMENT}, (2, 4, 1)),
        (4, {**LANES, "lanes": {"pictures": Lane(gpus=[0], task=["image"])}}, (4, 2, 1)),
        (4, {**LANES, "lanes": {"one": Lane(gpus=[0, 1])}}, (2, 4, 1)),
        (4, {**LANES, "lanes": {"one": Lane(gpus=[0, 1, 2])}}, (3, 4, 2, 1)),
        (4, {**LANES, "lanes": {"one": Lane(gpus=[0, 1], gpus_per_job=1)}}, (1, 2, 4)),
    ],
)
def test_every_strategy_has_its_counts_in_their_order_within_the_limits(
    available: int, given: dict[str, Any], counts: tuple[int, ...]
) -> None:
    choice = choose_counts(_requirements(**given), available)
    assert choice.counts == counts
    strategy = given.get("gpu_strategy", GpuStrategy.BY_VALUE)
    assert choice.by_time is (strategy is GpuStrategy.AUTO)
    assert choice.by_value is (strategy is GpuStrategy.BY_VALUE and choice.counts != (1,))
    assert choice.fixed is (given.get("gpu_strategy") is GpuStrategy.LANES), "a lane is not left"


@pytest.mark.parametrize(("model", "count"), [("x-8b", 1), ("x-40b", 2), ("x-72b", 4)])
def test_by_size_gives_seed_001s_counts(model: str, count: int) -> None:
    profile = load_profile("h100x4-strategy")
    facts = facts_from_name(model)
    targets = resolve_profile(profile, TaskType.INSTRUCT, facts).targets
    assert count_by_size(targets, facts)[0] == count


def test_by_size_is_written_by_the_operator() -> None:
    steps = [GpuStep(above="5B", gpus=3)]
    choice = choose_counts(_requirements(gpu_strategy=GpuStrategy.BY_SIZE, gpus_by_size=steps), 4)
    assert choice.counts == (3, 4, 2, 1)
    assert "above 5B" in choice.why


@each(
    ("model", "task", "kl", "count"),
    [
        ("x-4b", TaskType.INSTRUCT, False, 1),
        ("x-8b", TaskType.INSTRUCT, False, 2),
        ("x-8b", TaskType.DPO, False, 4),
        ("x-7b", TaskType.GRPO, False, 4),
        ("x-14b", TaskType.DPO, False, 8),
        ("x-3b", TaskType.INSTRUCT, True, 2),
    ],
)
def test_tournaments_hand_out_machines_by_effective_size(
    model: str, task: TaskType, kl: bool, count: int
) -> None:
    assert tournament_count(facts_from_name(model), task, kl)[0] == count


@pytest.mark.parametrize(
    ("model", "lane"), [("x-3b", "small"), ("x-8b", "medium"), ("x-40b", "large"), ("x-72b", "xlarge")]
)
def test_seed_002s_lanes_take_models_by_size(model: str, lane: str) -> None:
    profile, facts = load_profile("h100x8"), facts_from_name(model)
    targets = resolve_profile(profile, TaskType.INSTRUCT, facts).targets
    assert lane_for(targets, facts, TaskType.INSTRUCT)[0] == lane


@pytest.mark.parametrize("strategy", [GpuStrategy.ALL, GpuStrategy.AUTO])
def test_no_gpu_is_left_out_because_more_would_fit_larger_passes(strategy: GpuStrategy) -> None:
    """Smaller passes pad less: seven GPUs in such could train more than eight in larger ones."""
    facts, task = facts_from_name("meta-llama/Llama-3.1-70B"), TaskType.DPO
    profile = resolve_profile(load_profile("steady"), task, facts)
    targets = profile.targets.model_copy(update={"gpu_strategy": strategy})
    profile = profile.model_copy(update={"targets": targets})
    plan = plan_task(
        TaskSpec(task_type=task, hours=2), facts, assumed_facts(task, 50_000), host("8xH100"), profile
    )
    assert plan.gpus.count == 8


def _flagship(worth: TrainingWorth = IDLE_HOST, rows: int = 20_000) -> TrainingPlan:
    """An 8B instruct task on the four GPUs that `h100x4` is for."""
    return plan_task(
        TaskSpec(task_type=TaskType.INSTRUCT, hours=4),
        facts_from_name("meta-llama/Llama-3.1-8B"),
        assumed_facts(TaskType.INSTRUCT, rows),
        host(),
        load_profile("h100x4"),
        conditions=JobConditions(host(), worth=worth),
    )


def test_a_task_on_an_idle_host_uses_the_gpus_that_are_idle() -> None:
    plan = _flagship()
    assert (plan.gpus.count, plan.parallelism) == (4, Parallelism.FSDP)
    assert plan.steps.epochs == pytest.approx(8)
    inputs = example_inputs(plan.task.task_type, plan.model.model_id)
    rendered = render(plan, inputs)
    assert "--multi_gpu" in rendered.command
    assert "fsdp_config" in rendered.config


def test_the_more_others_ask_for_gpus_the_fewer_a_task_gets() -> None:
    """A GPU is taken for what the training gains: here from 1.4 epochs on one to 7.4 on four."""
    counts = [
        _flagship(TrainingWorth(4.8, 0.3, (price,) * 4), rows=100_000).gpus.count for price in (0.0, 0.2, 0.5)
    ]
    assert counts == [4, 2, 1]
    assert "no other task waits" in _flagship().reasons["gpus"].text
    assert "up to 0.5 points" in _flagship(TrainingWorth(4.8, 0.3, (0.0, 0.5))).reasons["gpus"].text


def test_when_others_want_gpus_the_cheapest_complete_training_is_taken() -> None:
    """More than all epochs is worth nothing: further GPUs would only end it earlier, for more GPU-hours."""
    plan = _flagship(TrainingWorth(4.8, 0.3, (0.3,) * 4))
    assert (plan.gpus.count, plan.steps.share) == (2, 1.0)


@each("rows", [2_000, 20_000])
def test_gpus_that_cost_nothing_are_used_as_those_of_an_idle_host(rows: int) -> None:
    """A job pays nothing for the GPUs that it holds: planned again on them, it leaves none of them idle."""
    plan = _flagship(TrainingWorth(4.8, 0.3, (0.0,) * 4), rows)
    assert plan.model_copy(update={"conditions": JobConditions(host())}) == _flagship(rows=rows)
    assert _flagship(TrainingWorth(4.8, 0.3, (0.0, 0.0, 2.0, 2.0)), rows).gpus.count == 2


def test_a_price_is_no_reason_to_train_too_little() -> None:
    few = TrainingWorth(1.0, 0.3, (10.0,) * 4)
    plan = _flagship(few, rows=1_000_000)
    assert plan.verdict.feasible
    assert plan.gpus.count > 1


def _large(task: TaskType, rows: int, price: float) -> TrainingPlan:
    """A 32B task on the flagship: it fits one or two GPUs only if something is given up."""
    facts = facts_from_name("Qwen/Qwen2.5-32B")
    profile = resolve_profile(load_profile("h100x4"), task, facts)
    conditions = JobConditions(host(), worth=TrainingWorth(8.0, 0.3, (price,) * 4))
    spec = TaskSpec(task_type=task, hours=4)
    return plan_task(spec, facts, assumed_facts(task, rows), host(), profile, conditions=conditions)


def test_where_no_count_completes_the_training_something_may_be_given_up_for_fewer_gpus() -> None:
    """Worth 0.6 % of a busy week's points: the larger counts keep GPUs from several other tasks."""
    plan = _large(TaskType.INSTRUCT, 50_000, 1.2)
    assert (plan.gpus.count, plan.verdict.feasible) == (1, True)
    assert _large(TaskType.INSTRUCT, 50_000, 0.0).gpus.count == 4


def test_where_a_count_completes_the_training_nothing_is_given_up_for_a_price() -> None:
    plan = _large(TaskType.INSTRUCT, 2_000, 1.2)
    assert (plan.gpus.count, plan.steps.share) == (4, 1.0)


@each("price", [0.02, 0.3, 2.0])
@each("task", [TaskType.INSTRUCT, TaskType.DPO, TaskType.GRPO])
@each("rows", [2_000, 50_000])
def test_counts_that_are_left_out_as_too_dear_would_not_have_been_chosen(
    price: float, task: TaskType, rows: int
) -> None:
    facts, hardware = facts_from_name("x-8b"), host("8xH100")
    conditions = JobConditions(hardware, worth=TrainingWorth(4.8, 0.3, (price,) * 8))
    profile = resolve_profile(load_profile("steady"), task, facts)

    def planned() -> TrainingPlan:
        spec, data = TaskSpec(task_type=task, hours=4), assumed_facts(task, rows)
        return plan_task(spec, facts, data, hardware, profile, conditions=conditions)

    chosen = planned()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("core.planning.search.fit._Search._could_be_worth_more", lambda *_: True)
        assert planned() == chosen
