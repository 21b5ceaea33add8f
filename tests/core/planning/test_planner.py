"""Whole plans: what is honoured, what gives way and why, what is refused."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from core.data.facts import assumed_facts, facts_from_lengths
from core.domain.choices import (
    Attention,
    CompileMode,
    Engine,
    GpuStrategy,
    Method,
    Optimizer,
    Parallelism,
    Refusal,
)
from core.domain.hardware import GPU_KINDS, GpuSet, Hardware
from core.domain.tasks import OFFERED_TASKS, ImageModelType, TaskType
from core.models.facts import ModelFacts
from core.models.identify import facts_from_name
from core.planning.budget import Concession
from core.planning.candidate import vary
from core.planning.conditions import JobConditions
from core.planning.memory.peak import fits_memory
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import PlanSummary, plan_task, quick_plan, usable_hours
from core.profile.declare import NameSystem
from core.profile.resolve import LoadedProfile, load_profile, resolve_profile
from core.profile.schema import FIELD_NAMES, ResolvedProfile
from core.profile.targets import Targets
from core.recipes.dry_run import example_inputs
from core.recipes.render import render
from tests.core.planning.candidates import host, on_all_gpus, resolved, with_strategy
from tests.doubles.each import each

LLAMA = "meta-llama/Llama-3.1-8B"


def _plan(
    profile: ResolvedProfile | LoadedProfile,
    task: TaskType = TaskType.INSTRUCT,
    model: ModelFacts | str = LLAMA,
    hours: float = 3,
    gpus: str = "4xH100",
    rows: int = 20_000,
    **given: Any,
) -> TrainingPlan:
    image = given.pop("image_type", None)
    facts = facts_from_name(model, None, image) if isinstance(model, str) else model
    data = given.pop("data", None) or assumed_facts(task, rows, image_type=image)
    spec = TaskSpec(task_type=task, hours=hours, image_type=image, kl_coefficient=given.pop("kl", None))
    return plan_task(spec, facts, data, given.pop("hardware", None) or host(gpus), profile, **given)


def _concession(plan: TrainingPlan, field: str) -> Concession | None:
    return next((concession for concession in plan.concessions if concession.field == field), None)


def test_targets_that_fit_are_taken_as_they_are() -> None:
    profile = resolved(lora_r=32, lora_alpha=64, micro_batch_size=4, num_epochs=1, sequence_len=1024)
    plan = _plan(profile, gpus="1xH100")
    assert plan.verdict.feasible
    assert (plan.adapter.rank, plan.adapter.alpha) == (32, 64)
    assert (plan.batch.micro, plan.batch.accumulation) == (4, 1)
    assert plan.sequence.length == 1024
    assert plan.steps.epochs == pytest.approx(1)
    assert not plan.concessions


def test_the_seed_000_profile_trains_its_rank_on_four_sharded_gpus_with_a_smaller_micro_batch() -> None:
    plan = _plan(on_all_gpus())
    assert plan.verdict.feasible
    assert (plan.gpus.count, plan.parallelism) == (4, Parallelism.FSDP)
    assert (plan.adapter.rank, plan.adapter.alpha) == (512, 1024)
    assert not plan.precision.gradient_checkpointing
    assert plan.optimizer.learning_rate == 8e-4
    assert plan.memory.budget_bytes == 75_000_000_000
    assert plan.env["NCCL_BUFFSIZE"] == "8388608"
    assert plan.batch.effective == 32 * 4
    concession = _concession(plan, "micro_batch_size")
    assert (concession.wanted, concession.got) == (32, plan.batch.micro)
    assert "over the 75.0 GB budget" in concession.reason, "the number that forced it"
    assert "activations" in concession.reason


@each("model", ["Qwen/Qwen2.5-3B", LLAMA, "meta-llama/Llama-3.1-70B"])
def test_the_seed_000_profile_takes_an_idle_host_and_keeps_its_numbers(model: str) -> None:
    plan = _plan(load_profile("h100x4"), model=model, hours=8)
    assert plan.verdict.feasible
    assert (plan.gpus.count, plan.parallelism) == (4, Parallelism.FSDP)
    assert (plan.adapter.rank, plan.optimizer.learning_rate) == (512, 8e-4)
    assert plan.batch.effective >= 32


@each(
    ("model", "best"),
    [
        ("bigscience/bloom-560m", Attention.EAGER),
        ("openai/gpt-oss-20b", Attention.EAGER),
        (facts_from_name(LLAMA).model_copy(update={"architecture": "mamba"}), Attention.EAGER),
        (facts_from_name(LLAMA).model_copy(update={"head_dim": 512}), Attention.SDPA),
        (LLAMA, Attention.FLASH_2),
    ],
)
@each("asked", [None, *Attention])
def test_a_model_gets_an_attention_kernel_that_it_supports(
    model: ModelFacts | str, best: Attention, asked: Attention | None
) -> None:
    """Without flash attention rows are not packed either: they would see each other."""
    plan = _plan(resolved(attention=asked, sample_packing=True), model=model)
    kept = best is Attention.FLASH_2 or asked in (best, Attention.EAGER)
    assert plan.precision.attention is (asked if asked and kept else best)
    assert (_concession(plan, "attention") is None) is (asked is None or kept)
    assert plan.sequence.packing is (best is Attention.FLASH_2)
    assert (_concession(plan, "sample_packing") is None) is plan.sequence.packing


@each("architecture", ["qwen3_5_text", "lfm2", "ministral3"])
def test_rows_that_would_see_each_other_are_not_packed(architecture: str) -> None:
    model = facts_from_name(LLAMA).model_copy(update={"architecture": architecture})
    assert _plan(resolved(), model=LLAMA).sequence.packing
    unasked, asked = (_plan(resolved(sample_packing=wish), model=model) for wish in (None, True))
    assert not unasked.sequence.packing
    assert not asked.sequence.packing
    assert f"sample_packing: off, {model.packing_problem}" in unasked.notes
    assert _concession(asked, "sample_packing").reason == model.packing_problem


SMALL, MIXTRAL, EXPERTS = "Qwen/Qwen2.5-0.5B", "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B"
WINDOW_1024 = facts_from_name(LLAMA).model_copy(update={"max_position": 1024})
SHARDED = {"fsdp_above": "1B", "gpu_strategy": "all"}
NATIVE = {"engine": Engine.NATIVE, "gradient_checkpointing": True}
SDXL = {"task": TaskType.IMAGE, "model": "x", "hours": 1, "rows": 30, "image_type": ImageModelType.SDXL}
T4 = GPU_KINDS["RTX-3090"].model_copy(
    update={"name": "T4", "compute_capability": (7, 5), "memory_bytes": 15 * 10**9}
)
ON_T4 = {"model": SMALL, "hours": 8, "hardware": Hardware(gpus=GpuSet(kind=T4, count=1))}
KEPT = "as asked for"
#: The plan's number of each target, where it has one of the same format.
NUMBERS = {field: path for path, field in FIELD_NAMES[NameSystem.PLAN].items() if field != "compile_mode"}


@each(
    ("targets", "given", "got", "reason"),
    [
        ({"sequence_len": 4096}, {"model": WINDOW_1024}, 1024, "the model's window"),
        ({"sequence_len": 4096}, {"limits": {"max_sequence_len": 600}}, 600, "limits.max_sequence_len"),
        ({"lora_r": 64}, {"limits": {"max_lora_r": 32}}, 32, "limits.max_lora_r"),
        ({"lora_rank_pattern": {"q_proj": 128}}, {"limits": {"max_lora_r": 100}}, {"q_proj": 100}, "limits."),
        ({"lora_rank_pattern": {"q_proj": 128}}, {}, KEPT, ""),
        ({"learning_rate": 8e-4, "lora_alpha": 1000}, {"limits": {"max_alpha_lr": 0.03}}, 3e-5, "limits."),
        ({"warmup_steps": 300, "max_steps": 100}, {}, 25, "a quarter"),
        ({"method": Method.FULL}, {"gpus": "1xRTX-4090"}, "lora", "over the"),
        ({"gradient_checkpointing": False}, {"gpus": "1xRTX-4090"}, True, "over the"),
        ({"optimizer": Optimizer.ADAMW_BNB_8BIT, **SHARDED}, {}, "adamw_torch_8bit", "FSDP2"),
        ({"ema_decay": 0.999, **SHARDED}, {}, KEPT, ""),
        ({"fp8": True, **NATIVE}, {}, False, "LoRA"),
        (
            {"compile_mode": CompileMode.MAX_AUTOTUNE, **NATIVE},
            {"rows": 200_000, "hours": 8},
            "max-autotune-no-cudagraphs",
            "graphs",
        ),
        ({"dataloader_num_workers": 4, **NATIVE}, {"hardware": host(cpu_cores=2)}, KEPT, ""),
        ({"vae_batch_size": 64}, SDXL, 8, "latents' cache"),
        ({"bf16": True}, ON_T4, False, "T4"),
        ({"fp8": True}, ON_T4, False, "T4"),
        ({"attention": Attention.FLASH_3}, ON_T4, "sdpa", "T4"),
        ({"engine": Engine.NATIVE}, {"task": TaskType.GRPO, "model": SMALL}, "axolotl", "GrpoTask"),
        ({"engine": Engine.KOHYA}, {"task": TaskType.CHAT, "model": SMALL}, "axolotl", "ChatTask"),
        ({"engine": Engine.NATIVE}, {"model": SMALL}, KEPT, ""),
        (
            {"lora_target_modules": None},
            {"model": MIXTRAL},
            "q_proj, k_proj, v_proj, o_proj",
            "45.1B of 46.7B",
        ),
        ({"lora_target_modules": None}, {"model": EXPERTS}, "q_proj, k_proj, v_proj, o_proj", "29B of 30.5B"),
        ({"lora_target_modules": ["q_proj", "up_proj"]}, {"model": MIXTRAL}, "q_proj", "15B of 46.7B"),
        ({"lora_target_modules": ["q_proj", "v_proj"]}, {"model": MIXTRAL}, KEPT, ""),
        ({"lora_target_modules": None}, {}, KEPT, ""),
        ({"lora_target_modules": None, "method": "full"}, {"model": EXPERTS, "gpus": "8xH200"}, KEPT, ""),
    ],
)
def test_a_target_that_gives_way_is_conceded_with_its_reason(
    targets: dict[str, Any], given: dict[str, Any], got: object, reason: str
) -> None:
    """It is the first of the targets."""
    field, wanted = next(iter(targets.items()))
    plan = _plan(
        resolved(given.get("limits"), **targets), **{k: v for k, v in given.items() if k != "limits"}
    )
    assert plan.verdict.feasible
    concession = _concession(plan, field)
    if got is KEPT:
        assert concession is None
        return
    if field == "lora_target_modules":
        wanted = ", ".join(wanted) if wanted else "every linear layer"
    assert (concession.wanted, concession.got) == (wanted, got)
    assert reason in concession.reason
    assert field not in NUMBERS or attrgetter(NUMBERS[field])(plan) == got


@each(
    ("rows", "hours", "targets", "kept"),
    [
        (3_000, 8, {"num_epochs": 4}, False),
        (60_000, 8, {"num_epochs": 4}, True),
        # As many epochs as the clock allows.
        (3_000, 0.5, {"num_epochs": None}, False),
        (3_000, 8, {"num_epochs": None}, True),
    ],
)
def test_compiling_is_kept_only_where_the_steps_win_it_back(
    rows: int, hours: float, targets: dict[str, Any], kept: bool
) -> None:
    limits, asked = {"max_epochs": 1000}, {"compile_mode": CompileMode.DEFAULT}
    plan, plain = (
        _plan(resolved(limits, **NATIVE, **targets, **more), rows=rows, hours=hours) for more in (asked, {})
    )
    concession = _concession(plan, "compile_mode")
    assert plan.precision.compile_mode is (CompileMode.DEFAULT if kept else None)
    assert plan.time["compile"] == (300 if kept else 0)
    if kept:
        assert concession is None
        assert (plan.steps.epochs, -plan.time["train"]) > (plain.steps.epochs, -plain.time["train"])
    else:
        assert (plan.steps, plan.time.total_s) == (plain.steps, plain.time.total_s)
        assert "5 min 00 s of compiling would save " in concession.reason


def test_axolotls_fp8_is_compiled_however_short_the_run() -> None:
    plan = _plan(resolved(fp8=True, compile_mode=CompileMode.DEFAULT, engine=Engine.AXOLOTL), rows=3_000)
    assert plan.precision.compile_mode is CompileMode.DEFAULT


def test_what_the_gpus_or_the_engine_cannot_do_is_not_in_the_plan() -> None:
    sharded, single = (
        _plan(resolved(ema_decay=0.999, **SHARDED), gpus=gpus) for gpus in ("4xH100", "1xH100")
    )
    assert sharded.ema == single.ema is not None
    assert 0 < sharded.memory["average"] < single.memory["average"]
    assert _plan(resolved(**NATIVE)).loader.workers == 0
    old = _plan(resolved(), **ON_T4).precision
    assert (old.bf16, old.fp16) == (False, True)


def test_checkpointing_is_switched_on_where_memory_asks_for_it_and_stays_on_where_the_profile_does() -> None:
    assert not _plan(resolved(), model=SMALL, gpus="1xH100").precision.gradient_checkpointing
    assert _plan(resolved(), gpus="1xRTX-4090").precision.gradient_checkpointing
    profile = resolved(gradient_checkpointing=True, micro_batch_size=16, sample_packing=False)
    asked = _plan(profile, gpus="1xH100")
    assert (asked.precision.gradient_checkpointing, asked.batch.micro) == (True, 16)


def test_quality_gives_way_in_the_documented_order() -> None:
    """A rank that data can hardly fill before rows, rows before four bits."""
    profile = resolved(lora_r=2048, micro_batch_size=1)
    plan = _plan(profile, model="Qwen/Qwen2.5-14B", gpus="1xH100")
    assert plan.verdict.feasible
    assert plan.method is Method.LORA
    assert _concession(plan, "lora_r") is not None
    assert _concession(plan, "sequence_len") is None
    tight = _plan(profile, model="Qwen/Qwen2.5-32B", gpus="1xA6000", hours=8)
    assert tight.method is Method.QLORA
    assert tight.verdict.feasible


def test_a_moving_average_gives_way_before_the_rank() -> None:
    def made(rank: int, decay: float | None, **given: Any) -> TrainingPlan:
        return _plan(resolved(lora_r=rank, micro_batch_size=1, ema_decay=decay, **SHARDED), **given)

    model = "Qwen/Qwen2.5-14B"
    plain, averaged, kept = made(1500, None, model=model), made(1500, 0.99, model=model), made(1024, 0.99)
    assert averaged.fsdp is not None
    assert (averaged.ema, averaged.adapter, averaged.batch) == (None, plain.adapter, plain.batch)
    assert "of average" in _concession(averaged, "ema_decay").reason
    assert kept.ema is not None
    alone = made(704, 0.99, model="Qwen/Qwen2.5-32B", gpus="1xH100")
    assert (alone.ema, alone.adapter.rank) == (None, 352)


def test_a_lora_in_place_of_a_full_fine_tune_has_its_own_rate() -> None:
    plan = _plan(resolved(method=Method.FULL, learning_rate=1e-5), gpus="1xRTX-4090")
    assert plan.optimizer.learning_rate == pytest.approx(1e-4)


def test_generation_is_not_sharded_when_the_model_fits_one_gpu() -> None:
    plan = _plan(on_all_gpus(), TaskType.GRPO, "Qwen/Qwen2.5-3B", hours=6)
    assert plan.parallelism is Parallelism.DDP
    assert "generation" in _concession(plan, "fsdp_above").reason


@pytest.mark.parametrize(
    ("model", "least", "most"),
    [
        ("Qwen/Qwen2.5-14B", 48, 48),  # 28 GB of weights: all of them while it generates
        ("Qwen/Qwen2.5-32B", 16, 40),  # 64 GB, beside rank 512 and what is generated
    ],
)
def test_weights_are_gathered_once_for_a_generation_where_they_fit(model: str, least: int, most: int) -> None:
    plan = _plan(on_all_gpus(), TaskType.GRPO, model, hours=8)
    assert plan.verdict.feasible
    assert plan.parallelism is Parallelism.FSDP
    candidate, budget, layers = plan.candidate, plan.memory.budget_bytes, plan.grpo.whole_layers
    assert candidate.gathered_layers == layers
    assert least <= layers <= most
    assert plan.memory.total_bytes <= budget
    one_more = vary(candidate, gathered_layers=layers + 1)
    assert layers == plan.model.layers or not fits_memory(one_more, budget)


@pytest.mark.parametrize(
    ("task", "targets", "whole"),
    [
        (TaskType.INSTRUCT, {}, False),
        (TaskType.DPO, {}, False),
        (TaskType.GRPO, {"grpo_vllm": True}, False),
        # 15 GB of weights, and states that only shards hold.
        (TaskType.GRPO, {"method": Method.FULL, "micro_batch_size": 64}, True),
    ],
    ids=["instruct", "dpo", "vllm", "full by rewards"],
)
def test_weights_are_gathered_whole_only_to_generate(
    task: TaskType, targets: dict[str, Any], whole: bool
) -> None:
    plan = _plan(resolved(**SHARDED, **targets), task, "Qwen/Qwen2.5-7B", hours=8)
    assert plan.parallelism is Parallelism.FSDP
    assert plan.candidate.gathered_layers == (plan.model.layers if whole else 0)


@each("gpus", [1, 2, 4, 8])
@each(
    ("model", "hours", "method"),
    [
        ("Qwen/Qwen2.5-1.5B", 2, Method.FULL),
        ("Qwen/Qwen2.5-3B", 2, Method.LORA),
        (LLAMA, 4, Method.LORA),
        ("meta-llama/Llama-3.1-70B", 8, Method.LORA),
    ],
)
def test_preferences_are_learned_by_adapters_from_2b_on(
    model: str, hours: float, method: Method, gpus: int
) -> None:
    """The adapter switched off is the reference, and the search for a rate has room above the plan's."""
    plan = _plan(load_profile("steady"), TaskType.DPO, model, hours, gpus=f"{gpus}xH100")
    assert plan.verdict.feasible
    tight = model.endswith("70B") and gpus < 4
    assert plan.method is (Method.QLORA if tight else method)
    assert plan.memory["reference"] == (0 if plan.adapter else plan.memory["reference"])
    assert plan.steps.epochs == pytest.approx(3, abs=0.01) or gpus < 4
    if plan.adapter is not None:
        assert plan.adapter.alpha == 256
        assert 1e-3 < plan.adapter.alpha * plan.optimizer.learning_rate < 3e-3
        assert plan.lr_search.highest >= 10


@each("gpus", [1, 2, 3, 4, 8])
def test_grpo_batches_are_what_axolotl_accepts(gpus: int) -> None:
    plan = _plan(load_profile("steady"), TaskType.GRPO, "Qwen/Qwen2.5-3B", gpus=f"{gpus}xH100", hours=6)
    batch, generations = plan.batch, plan.targets.grpo_generations
    assert batch.micro * batch.accumulation % generations == 0
    assert batch.micro * batch.accumulation >= generations * batch.world_size
    reason = _concession(plan, "effective_batch_size").reason
    assert ("groups" if gpus == 8 else "completions take") in reason


def test_the_clock_decides_the_epochs_and_says_so() -> None:
    long, short = _plan(resolved(num_epochs=3), hours=8), _plan(resolved(num_epochs=3), hours=1, rows=100_000)
    assert long.steps.epochs == pytest.approx(3)
    assert short.steps.epochs < 3
    assert short.steps.wanted == pytest.approx(short.steps.per_epoch * 3, abs=1)
    assert "left for training" in _concession(short, "num_epochs").reason


@each(("asked", "epochs", "cycles"), [(2, 1, 2), ("2-4", 1, 2), ("2-4", 3, 3), ("1-2", 3, 2)])
def test_restarts_are_as_many_as_epochs_within_the_profiles_range(
    asked: Any, epochs: float, cycles: int
) -> None:
    targets = Targets.model_validate({"lr_scheduler": "cosine_with_restarts", "lr_cycles": asked})
    profile = resolved(num_epochs=epochs, lr_scheduler=targets.lr_scheduler, lr_cycles=targets.lr_cycles)
    assert _plan(profile, hours=8).optimizer.cycles == cycles


def test_a_time_limit_is_kept_with_its_reserve() -> None:
    plan = _plan(resolved({"reserve": 1200.0}, num_epochs=50), hours=1)
    assert plan.time.reserve_s == 1200
    assert 0 <= plan.time.slack_s < 120


def test_a_model_in_the_cache_and_a_validator_who_uploads_leave_more_time() -> None:
    profile = resolved(num_epochs=50)
    plain = _plan(profile, hours=1)
    tournament = _plan(profile, hours=1, conditions=JobConditions(host(), model_cached=True, publishes=False))
    assert tournament.steps.total > plain.steps.total
    assert tournament.time["download"] == tournament.time["publish"] == 0


def test_a_target_for_the_score_is_in_the_plan_and_changes_nothing_of_what_runs() -> None:
    aimed, plain = _plan(resolved(target_loss=0.064, target_gain=0.15)), _plan(resolved())
    assert str(aimed.goal) == "loss below 0.064, 15 % better than the base"
    assert plain.goal is None
    assert aimed.digest == plain.digest


def test_native_ranks_read_their_own_shards_where_axolotls_send_them_to_each_other() -> None:
    model = "meta-llama/Llama-3.1-70B"
    whole = _plan(resolved(engine="native", gpu_strategy="all"), gpus="8xH100", model=model, hours=8)
    sent = _plan(resolved(engine="axolotl", gpu_strategy="all"), gpus="8xH100", model=model, hours=8)
    assert whole.parallelism is sent.parallelism is Parallelism.FSDP
    assert sent.time["load"] - 5 == pytest.approx(1.5 * (whole.time["load"] - 5))


def test_the_rate_grows_with_the_gpus_as_seed_001_says() -> None:
    profile = resolved(lr_gpu_scale={2: 1.2, 4: 1.5}, learning_rate=2e-4, gpu_strategy="all")
    rates = [_plan(profile, gpus=f"{n}xH100").optimizer.learning_rate for n in (1, 2, 3, 4)]
    assert rates == pytest.approx([2e-4, 2.4e-4, 2.4e-4, 3e-4])


def test_jobs_have_the_share_of_the_host_that_their_gpus_have() -> None:
    """A profile that asks for more than that is told in a concession."""
    whole = _plan(on_all_gpus(), hardware=host(cpu_cores=24, memory_bytes=200 * 10**9))
    assert (whole.loader.workers, whole.container.cpus) == (6, "0-23")
    assert 0.9 * 200e9 < whole.container.memory_bytes <= 200e9
    hardware = host("8xH100", memory_bytes=800 * 10**9)
    half = _plan(on_all_gpus(), hardware=hardware)
    assert half.gpus.count == 4
    assert 0.4 * 800e9 < half.container.memory_bytes <= 0.5 * 800e9
    assert _concession(half, "dataloader_num_workers") is not None
    given = hardware.model_copy(update={"gpus": hardware.gpus.take(4), "host_gpus": 8})
    alone = _plan(on_all_gpus(), hardware=given)
    assert (alone.container, alone.loader) == (half.container, half.loader)
    single = _plan(with_strategy("by_size"), hardware=host(cpu_cores=64, memory_bytes=10**12))
    assert (single.gpus.count, single.loader.workers) == (1, 16)


def test_a_small_disk_keeps_fewer_checkpoints_but_always_one() -> None:
    profile = resolved(save_total_limit=8, lora_r=256)
    roomy, tight, full = (
        _plan(profile, hardware=host("1xH100", disk_free_bytes=free)) for free in (10**12, 40 * 10**9, 10**9)
    )
    assert roomy.steps.keep_checkpoints == 8 > tight.steps.keep_checkpoints > 1
    assert full.steps.keep_checkpoints == 1
    assert _concession(tight, "save_total_limit") is not None


def test_a_validator_that_penalises_divergence_costs_a_reference_pass() -> None:
    plain, kl = _plan(resolved()), _plan(resolved(), kl=0.5)
    assert kl.time.throughput < plain.time.throughput
    assert kl.memory["logits"] > plain.memory["logits"] or kl.batch.micro < plain.batch.micro
    assert not _plan(resolved(), kl=0.0).candidate.kl, "a term of no weight is none"


def test_the_references_pass_comes_first_only_where_that_saves_time() -> None:
    many = _plan(resolved(num_epochs=3), TaskType.DPO, hours=12)
    few = _plan(resolved(num_epochs=3), TaskType.DPO, hours=1, rows=200_000)
    assert many.dpo.precompute_reference
    assert not few.dpo.precompute_reference


@each("kind", list(ImageModelType))
def test_every_image_type_is_planned_for_its_engine(kind: ImageModelType) -> None:
    plan = _plan(load_profile("steady"), TaskType.IMAGE, "x", hours=1, rows=30, image_type=kind)
    assert plan.verdict.feasible
    kohya = kind in (ImageModelType.SDXL, ImageModelType.FLUX)
    assert plan.engine is (Engine.KOHYA if kohya else Engine.AI_TOOLKIT)
    assert plan.image is not None
    assert kohya or plan.gpus.count == 1


@pytest.mark.parametrize("kind", [ImageModelType.FLUX, ImageModelType.SDXL])
def test_even_a_short_image_training_saves_during_the_run(kind: ImageModelType) -> None:
    for hours in (0.5, 2):
        plan = _plan(load_profile("h100x4"), TaskType.IMAGE, "x", hours, rows=30, image_type=kind)
        assert plan.verdict.feasible
        assert plan.image.save_every_epochs <= max(plan.steps.epochs / 2, 1)
        assert plan.time.slack_s >= 0


def test_every_number_shown_has_a_reason() -> None:
    plan = _plan(load_profile("h100x4"))
    assert plan.reasons["adapter.rank"].source == "h100x4.yaml:11"
    assert "budget" in plan.reasons["batch.micro"].text
    assert all(reason.text for reason in plan.reasons.values())


PICTURES = {"task": TaskType.IMAGE, "image": ImageModelType.SDXL}


def _offered(
    name: str = "x-8b",
    count: int | None = None,
    hours: float = 3,
    task: TaskType = TaskType.INSTRUCT,
    profile: str = "steady",
    hardware: Hardware | None = None,
    rows: int | None = None,
    image: ImageModelType | None = None,
) -> TrainingPlan:
    """All of the plan of which an offer sees the summary."""
    hardware, loaded, model = hardware or host(), PROFILES[profile], facts_from_name(name, count, image)
    given: dict[str, Any] = {"image_type": image, "rows": rows, "stated_params": count}
    offered = resolve_profile(loaded, task, model, None if task.is_text else rows)
    summary = quick_plan(model, hours, task, hardware, offered, **given)
    hours = usable_hours(hours)
    data = assumed_facts(task, None if rows is None else max(rows, 0), hours, image)
    spec = TaskSpec(task_type=task, hours=hours, image_type=image)
    plan = plan_task(spec, model, data, hardware, loaded, stated_params=count, explained=False)
    time, steps = plan.time, plan.steps
    wanted = steps.wanted or steps.total
    assert summary == PlanSummary(
        code=plan.verdict.code,
        reason=plan.verdict.reason,
        gpus=plan.gpus.count,
        gpu_kind=plan.gpus.kind.name,
        epochs=steps.epochs,
        share=min(steps.total / wanted, 1.0) if wanted else 0.0,
        total_s=time.total_s,
        slack_s=time.slack_s,
        budget_s=time.deadline_s - time.reserve_s,
        reference_s=time["reference"],
        around_s=time.total_s - (time["train"] + time["evaluate"] + time["save"]),
        rows=plan.data.rows,
    )
    return plan


PROFILES = {
    name: load_profile(name) for name in ("h100x4", "h100x8", "h100x4-strategy", "steady", "h100-fast")
}


def test_an_offers_summary_is_that_of_the_whole_plan() -> None:
    """`_offered` compares them; over sizes from toys to giants, all types, and small GPUs."""
    random = Random(56)
    for _ in range(400):
        task, params = random.choice(OFFERED_TASKS), round(10 ** random.uniform(6.5, 12.8))
        family = random.choice(("Llama-3", "Qwen2.5", "mixtral", "deepseek-v2", "gpt2", "unheard-of"))
        _offered(
            f"someone/{family}-{params / 1e9:.1f}b",
            random.choice((None, params)),
            random.choice((0.01, 0.5, 1, 3, 8, random.uniform(0.1, 12))),
            task,
            random.choice(list(PROFILES)),
            host(random.choice(("1xL4", "2xA6000", "4xH100", "8xH100"))),
            random.choice((None, 0, 20, 5000)),
            random.choice(list(ImageModelType)) if not task.is_text else None,
        )


@each(
    ("given", "code"),
    [
        ({"name": "who/knows"}, Refusal.UNKNOWN_SIZE),
        ({"name": "who/knows", "count": 0}, Refusal.UNKNOWN_SIZE),
        ({"count": 10**15}, Refusal.ABSURD_SIZE),
        ({"name": "runwayml/stable-diffusion-v1-5", **PICTURES}, Refusal.NO_ENGINE),
        ({"name": "stabilityai/stable-diffusion-2-1", **PICTURES}, Refusal.NO_ENGINE),
        ({"hours": 0}, Refusal.NO_TIME),
        ({"hours": -3}, Refusal.NO_TIME),
        ({"hours": float("nan")}, Refusal.NO_TIME),
        ({"hours": float("inf")}, Refusal.NO_TIME),
        ({"rows": -1}, Refusal.EMPTY_DATASET),
        ({"hours": 0.05}, Refusal.NO_TIME),
        ({"hours": 0.25, "profile": "h100x4"}, Refusal.NO_TIME),
        ({"rows": 0}, Refusal.EMPTY_DATASET),
        ({"name": "x-405b", "profile": "h100x4"}, Refusal.NO_MEMORY),
        ({"name": "x-70b", "hours": 1, "task": TaskType.DPO, "rows": 200_000}, Refusal.TOO_SLOW),
    ],
)
def test_bad_input_is_refused_with_its_reason(given: dict[str, Any], code: Refusal) -> None:
    plan = _offered(**given)
    assert plan.verdict.code is code
    assert len(plan.verdict.reason) > 20
    assert TrainingPlan.from_json(plan.to_json()) == plan


def test_one_row_of_two_hundred_thousand_tokens_leaves_nothing_to_train() -> None:
    data = facts_from_lengths(TaskType.INSTRUCT, [100_000], [100_000])
    plan = _plan(resolved(), data=data)
    assert plan.verdict.code is Refusal.ROWS_TOO_LONG
    assert "200,000" in plan.verdict.reason


@each(
    ("limits", "code"),
    [
        ({"gpu_memory": 10**9}, Refusal.IMPOSSIBLE_LIMIT),
        ({"gpu_memory_share": 0.001}, Refusal.IMPOSSIBLE_LIMIT),
        ({"min_gpus": 8}, Refusal.NO_GPU),
        ({"min_gpus": 4, "max_gpus": 2}, Refusal.IMPOSSIBLE_LIMIT),
        ({"reserve": 20_000.0}, Refusal.NO_TIME),
    ],
)
def test_limits_that_leave_nothing_are_named(limits: dict[str, Any], code: Refusal) -> None:
    plan = _plan(resolved(limits))
    assert plan.verdict.code is code
    assert plan.verdict.reason


def test_the_cpu_demo_profile_plans_on_a_cpu() -> None:
    plan = _plan(load_profile("cpu-demo"), model="tiny-10m", gpus="cpu", hours=0.5, rows=100)
    assert plan.verdict.feasible
    assert plan.memory["cuda"] == 0
    assert not plan.precision.bf16


@each("engine", [Engine.AXOLOTL, Engine.NATIVE])
def test_a_loss_that_axolotl_compiles_is_not_used_on_a_cpu(engine: Engine) -> None:
    """A profile of an operator's own extends `steady`, and is rehearsed on a CPU."""
    plan = _plan(resolved(engine=engine), model="tiny-10m", gpus="cpu", hours=0.5, rows=100)
    given = {one.field for one in plan.concessions}
    compiled = engine is Engine.AXOLOTL
    assert plan.precision.fused_loss is not compiled
    assert ("fused_loss" in given) is compiled
    config = render(plan, example_inputs(TaskType.INSTRUCT)).config
    assert "chunked_cross_entropy" not in config
    on_gpu = _plan(resolved(engine=engine), model="tiny-10m", gpus="1xH100", hours=0.5, rows=100)
    assert on_gpu.precision.fused_loss


PAGE = (Path(__file__).parents[3] / "docs" / "planning.md").read_text(encoding="utf-8")


@each("word", [*Refusal, *GpuStrategy])
def test_every_refusal_and_every_strategy_is_explained(word: str) -> None:
    assert f"| `{word}` |" in PAGE
