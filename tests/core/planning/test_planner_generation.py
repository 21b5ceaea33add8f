"""Plans for rewards: who generates, how much at once, and how many of the prompts are seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from core.data.facts import assumed_facts
from core.domain.choices import GpuStrategy, Method
from core.domain.evaluation import Era
from core.domain.job_states import EndReason
from core.domain.tasks import TaskType
from core.models.facts import ModelFacts
from core.models.identify import facts_from_name
from core.planning.candidate import vary
from core.planning.conditions import JobConditions
from core.planning.memory.peak import fits_memory, generation_fits
from core.planning.oom import OutOfMemory, next_after_oom
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task, replan
from core.planning.time.speed import forward_flops, generate_seconds, training_flops
from core.runs.remedies import AttemptFailure, workarounds_after
from tests.core.planning.candidates import host, resolved

LLAMA_8B, SEGMENTS = "meta-llama/Llama-3.1-8B", "PYTORCH_CUDA_ALLOC_CONF"


def plan_of(
    model: str | ModelFacts = LLAMA_8B,
    gpus: str = "1xH100",
    *,
    vllm: bool = True,
    hours: float = 3,
    rows: int = 20_000,
    env: dict[str, str] | None = None,
    era: Era = Era.OFFERS,
    **targets: Any,
) -> TrainingPlan:
    hardware = host(gpus)
    profile = resolved(**{"grpo_vllm": None, "grpo_beta": 0.04, "effective_batch_size": 64, **targets})
    return plan_task(
        TaskSpec(task_type=TaskType.GRPO, hours=hours),
        facts_from_name(model) if isinstance(model, str) else model,
        assumed_facts(TaskType.GRPO, rows),
        hardware,
        profile.model_copy(update={"env": env or {}}),
        conditions=JobConditions(hardware, vllm=vllm, era=era),
    )


def with_heads_of(width: int) -> ModelFacts:
    return facts_from_name(LLAMA_8B).model_copy(update={"head_dim": width})


@pytest.mark.parametrize(
    ("model", "options", "share"),
    [
        ("Qwen/Qwen2.5-1.5B", {}, 0.4),
        ("Qwen/Qwen2.5-3B", {}, 0.35),
        (LLAMA_8B, {}, 0.5),
        ("Qwen/Qwen2.5-32B", {}, None),
        ("Qwen/Qwen2.5-32B", {"grpo_vllm": True, "method": Method.LORA, "gpus": "4xH200"}, 0.8),
        (LLAMA_8B, {"vllm": False}, None),
        (LLAMA_8B, {"vllm": False, "grpo_vllm": True}, 0.5),
        (LLAMA_8B, {"grpo_vllm": False}, None),
        (with_heads_of(160), {}, None),
        (LLAMA_8B, {"method": Method.QLORA}, None),
        (LLAMA_8B, {"gpus": "4xH100", "fsdp_above": "1B", "gpu_strategy": GpuStrategy.ALL}, 0.5),
        ("Qwen/Qwen2.5-0.5B", {"gpus": "cpu"}, None),
        # 16 GB of weights and half of 24 GB for vLLM: nothing is given up for what nobody asked for.
        (LLAMA_8B, {"gpus": "1xRTX-4090"}, None),
    ],
    ids=[
        "small",
        "3B",
        "8B",
        "too large",
        "too large, asked for",
        "not installed",
        "asked for",
        "not wanted",
        "heads that its kernels lack",
        "a base in 4 bits",
        "DDP in place of shards",
        "no GPU",
        "no room",
    ],
)
def test_vllm_generates_where_it_is_installed_and_nothing_is_given_up_for_it(
    model: str | ModelFacts, options: dict[str, Any], share: float | None
) -> None:
    plan = plan_of(model, **options)
    assert plan.grpo.vllm is (share is not None)
    assert plan.grpo.vllm_sleep is plan.grpo.vllm
    if share is not None:
        assert plan.grpo.vllm_memory_share == share
        assert plan.memory.total_bytes <= plan.memory.budget_bytes or not plan.verdict.feasible
    elif "RTX" in options.get("gpus", ""):
        assert plan == plan_of(model, **{**options, "grpo_vllm": False}).model_copy(
            update={name: getattr(plan, name) for name in ("profile", "candidate", "targets", "reasons")}
        )


def test_a_vllm_that_sleeps_goes_without_segments_that_it_refuses() -> None:
    settings = {SEGMENTS: "expandable_segments:True,max_split_size_mb:128", "OTHER": "1"}
    assert plan_of(env=settings).env == {SEGMENTS: "max_split_size_mb:128", "OTHER": "1"}
    assert plan_of(env={SEGMENTS: "expandable_segments:True"}).env == {}
    assert plan_of(env=settings, vllm=False).env == settings


def test_training_samples_as_its_evaluation_does() -> None:
    offers, tournament = plan_of(vllm=False), plan_of(vllm=False, era=Era.TOURNAMENTS)
    assert (offers.grpo.temperature, offers.grpo.top_k) == (0.9, 50)
    assert (tournament.grpo.temperature, tournament.grpo.top_k) == (1.0, 0)
    own = plan_of(vllm=False, era=Era.TOURNAMENTS, grpo_temperature=0.7)
    assert own.grpo.temperature == 0.7, "what the profile says holds"


def test_vllm_makes_steps_shorter() -> None:
    with_it, without = plan_of(), plan_of(vllm=False)
    assert with_it.time.step_s < 0.7 * without.time.step_s
    assert with_it.prompt_coverage > 1.3 * without.prompt_coverage


def test_completions_wait_where_not_all_fit_and_the_step_stays_as_large() -> None:
    plan = plan_of("Qwen/Qwen2.5-7B", "1xRTX-4090", vllm=False, effective_batch_size=512)
    assert plan.batch.effective == 512
    together, candidate, budget = plan.grpo.together, plan.candidate, plan.memory.budget_bytes
    assert together is not None
    assert together % plan.targets.grpo_generations == 0
    assert fits_memory(candidate, budget)
    assert not generation_fits(vary(candidate, together=together + plan.targets.grpo_generations), budget)
    assert plan_of("Qwen/Qwen2.5-7B", vllm=False).grpo.together is None, "there is room for all"


def sharded_14b(gpus: str, batch: int) -> TrainingPlan:
    sharded = {"fsdp_above": "1B", "gpu_strategy": GpuStrategy.ALL, "method": Method.LORA}
    return plan_of("Qwen/Qwen2.5-14B", gpus, vllm=False, effective_batch_size=batch, hours=8, **sharded)


def test_out_of_memory_in_a_generation_what_costs_the_least_time_goes_first() -> None:
    """On fast links that is layers: see `test_oom`."""
    slow_links = next_after_oom(sharded_14b("4xRTX-4090", 64), OutOfMemory(moment="generation"))
    assert slow_links.oom_steps == ("grpo.together 16 → 8",)
    assert slow_links.grpo.whole_layers == 48


@pytest.mark.parametrize(
    ("gpus", "batch", "together", "layers"),
    [
        # All 32 at once would leave room for 22 of 48 layers, nine times as slow.
        ("4xRTX-4090", 64, 16, 48),
        ("4xA100-40", 512, 64, 14),
    ],
)
def test_completions_at_once_and_gathered_layers_share_the_memory_as_is_fastest(
    gpus: str, batch: int, together: int, layers: int
) -> None:
    plan = sharded_14b(gpus, batch)
    candidate, budget = plan.candidate, plan.memory.budget_bytes
    assert (plan.grpo.together, plan.grpo.whole_layers) == (together, layers)
    assert generation_fits(candidate, budget)
    others = [
        vary(candidate, together=each, gathered_layers=gathered)
        for each in range(8, candidate.per_gpu + 1, 8)
        for gathered in range(plan.model.layers + 1)
    ]
    fastest = min(generate_seconds(other) for other in others if generation_fits(other, budget))
    assert generate_seconds(candidate) == pytest.approx(fastest)


def test_out_of_memory_vllm_gets_less_and_at_last_nothing() -> None:
    plans = [plan_of()]
    for moment in ("load", "generation", "generation", "generation"):
        plans.append(next_after_oom(plans[-1], OutOfMemory(moment=moment)))
    assert [step.split()[0] for step in plans[-1].oom_steps] == ["grpo.vllm_memory_share"] * 4
    shares = [plan.grpo.vllm_memory_share for plan in plans if plan.grpo.vllm]
    assert shares == [0.5, 0.38, 0.29, 0.22]
    assert not plans[-1].grpo.vllm
    assert not plans[-1].grpo.vllm_sleep
    assert len({plan.batch for plan in plans}) == 1
    in_a_step = next_after_oom(plans[0], OutOfMemory(moment="train"))
    assert in_a_step.grpo.vllm, "asleep it is not in the way"


@pytest.mark.parametrize("reason", [EndReason.CRASHED, EndReason.HUNG])
def test_after_a_failure_the_trainer_generates_itself(reason: EndReason) -> None:
    plan = plan_of()
    failure = AttemptFailure(reason, "ImportError: vllm")
    workarounds = workarounds_after(plan, failure)
    again = replan(plan, replace(plan.conditions, workarounds=workarounds), plan.task.hours)
    assert (again.grpo.vllm, again.grpo.vllm_sleep) == (False, False)
    assert "vLLM" in again.notes[-1]
    assert again.time.step_s > 1.4 * plan.time.step_s, "its steps take longer"
    assert again.steps.total <= plan.steps.total
    assert {term.name for term in again.memory.terms}.isdisjoint({"vllm", "vllm awake"})
    assert again.oom_steps == ()
    assert [given.field for given in again.concessions] == [given.field for given in plan.concessions]
    assert workarounds_after(again, AttemptFailure(reason)) == workarounds


def test_a_plan_says_how_many_of_the_prompts_it_sees() -> None:
    few = plan_of(vllm=False, hours=1, rows=100_000)
    assert few.prompt_coverage == few.steps.epochs < 0.3
    assert any("of the" in note and "prompts are seen" in note for note in few.notes)
    many = plan_of(hours=6, rows=1_000)
    assert many.prompt_coverage == 1.0
    assert not any("prompts are seen" in note for note in many.notes)
    more = plan_of(vllm=False, hours=1, rows=100_000, grpo_generations=2)
    assert more.prompt_coverage > 2 * few.prompt_coverage


def test_a_kl_on_prompts_takes_memory_and_time_and_needs_the_base() -> None:
    plain = plan_of(vllm=False, grpo_vllm=False, grpo_beta=0.0)
    with_kl = plan_of(vllm=False, grpo_vllm=False, grpo_beta=0.0, grpo_prompt_kl=0.5)
    assert with_kl.grpo is not None
    assert with_kl.targets.grpo_prompt_kl == 0.5
    assert with_kl.memory["logits"] > plain.memory["logits"]
    assert with_kl.time.throughput < plain.time.throughput
    assert with_kl.memory["activations"] > plain.memory["activations"]
    assert with_kl.candidate.needs_base
    assert not plain.candidate.needs_base


def test_trls_own_kl_takes_the_base_over_all_tokens_and_one_on_prompts_does_not() -> None:
    on_prompts = plan_of(vllm=False, grpo_vllm=False, grpo_beta=0.0, grpo_prompt_kl=0.5)
    both = plan_of(vllm=False, grpo_vllm=False, grpo_beta=0.04, grpo_prompt_kl=0.5)
    first, second = (training_flops(plan.candidate, 500.0) for plan in (on_prompts, both))
    assert second - first == pytest.approx(forward_flops(both.candidate, 500.0))
