"""Whole plans: what is honoured, what gives way and why, what is refused."""

from __future__ import annotations

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
from core.domain.hardware import GPU_KINDS, GpuSet, Hardware, parse_gpus
from core.domain.tasks import ImageModelType, TaskType
from core.models.facts import ModelFacts
from core.models.identify import facts_from_name
from core.planning.budget import Concession
from core.planning.candidate import candidate_of, vary
from core.planning.memory import fits_memory
from core.planning.overheads import JobConditions
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import PlanSummary, plan_task, quick_plan, usable_hours
from core.profile.resolve import LoadedProfile, load_profile, resolve_profile
from core.profile.schema import ResolvedProfile
from tests.core.planning.candidates import host, on_all_gpus, resolved
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
    return next((one for one in plan.concessions if one.field == field), None)


def test_targets_that_fit_are_taken_as_they_are() -> None:
    profile = resolved(lora_r=32, lora_alpha=64, micro_batch_size=4, num_epochs=1, sequence_len=1024)
    plan = _plan(profile, gpus="1xH100")
    assert plan.verdict.feasible
    assert (plan.adapter.rank, plan.adapter.alpha) == (32, 64)
    assert (plan.batch.micro, plan.batch.accumulation) == (4, 1)
    assert plan.sequence.length == 1024
    assert plan.steps.epochs == pytest.approx(1)
    assert not plan.concessions


def test_a_micro_batch_that_does_not_fit_gives_way_with_the_number_that_forced_it() -> None:
    plan = _plan(on_all_gpus())
    concession = _concession(plan, "micro_batch_size")
    assert concession.wanted == 32
    assert concession.got == plan.batch.micro
    assert "over the 75.0 GB budget" in concession.reason
    assert "activations" in concession.reason
    assert plan.batch.effective == 32 * 4
    assert str(concession).startswith(f"micro_batch_size 32 → {plan.batch.micro}: ")


def test_a_model_gets_an_attention_kernel_that_it_supports() -> None:
    """Without flash attention rows are not packed either: they would see each other."""
    wide = facts_from_name(LLAMA).model_copy(update={"head_dim": 512})
    mamba = facts_from_name(LLAMA).model_copy(update={"architecture": "mamba"})
    for model, best in (
        ("bigscience/bloom-560m", Attention.EAGER),
        ("openai/gpt-oss-20b", Attention.EAGER),
        (mamba, Attention.EAGER),
        (wide, Attention.SDPA),
        (LLAMA, Attention.FLASH_2),
    ):
        for asked in (None, *Attention):
            plan = _plan(resolved(attention=asked, sample_packing=True), model=model)
            kept = best is Attention.FLASH_2 or asked in (best, Attention.EAGER)
            assert plan.precision.attention is (asked if asked and kept else best)
            assert (_concession(plan, "attention") is None) is (asked is None or kept)
            assert plan.sequence.packing is (best is Attention.FLASH_2)
            assert (_concession(plan, "sample_packing") is None) is plan.sequence.packing


@pytest.mark.parametrize("asked", [None, 4096])
@pytest.mark.parametrize(
    ("window", "limit", "reason"),
    [(1024, 8192, "the model's window is 1024"), (131_072, 600, "limits.max_sequence_len is 600")],
    ids=["window", "limit"],
)
def test_no_sequence_exceeds_the_models_window_or_the_limit(
    asked: int | None, window: int, limit: int, reason: str
) -> None:
    model = facts_from_name(LLAMA).model_copy(update={"max_position": window})
    plan = _plan(resolved({"max_sequence_len": limit}, sequence_len=asked), TaskType.CHAT, model)
    assert plan.sequence.length == min(window, limit)
    concession = _concession(plan, "sequence_len")
    assert (concession and concession.reason) == (reason if asked else None)


def test_experts_out_of_an_adapters_reach_are_conceded_with_their_parameters() -> None:
    attention, mixtral = "q_proj, k_proj, v_proj, o_proj", "mistralai/Mixtral-8x7B-v0.1"
    for model, asked, expected in (
        (mixtral, None, ("every linear layer", attention, "45.1B of 46.7B")),
        ("Qwen/Qwen3-30B-A3B", None, ("every linear layer", attention, "29B of 30.5B")),
        (mixtral, ["q_proj", "up_proj"], ("q_proj, up_proj", "q_proj", "15B of 46.7B")),
        (mixtral, ["q_proj", "v_proj"], None),
        (LLAMA, None, None),
    ):
        plan = _plan(resolved(lora_target_modules=asked, method=Method.LORA), model=model)
        concession = _concession(plan, "lora_target_modules")
        assert (concession is None) is (expected is None)
        if concession is not None and expected is not None:
            assert (concession.wanted, concession.got) == expected[:2]
            assert concession.reason.startswith(expected[2])
    full = _plan(resolved(method=Method.FULL), model="Qwen/Qwen3-30B-A3B", gpus="8xH100")
    assert full.method is not Method.FULL or _concession(full, "lora_target_modules") is None


def test_the_seed_000_profile_trains_its_rank_on_four_sharded_gpus_without_checkpointing() -> None:
    plan = _plan(on_all_gpus())
    assert plan.verdict.feasible
    assert plan.gpus.count == 4
    assert plan.parallelism is Parallelism.FSDP
    assert (plan.adapter.rank, plan.adapter.alpha) == (512, 1024)
    assert not plan.precision.gradient_checkpointing
    assert plan.optimizer.learning_rate == 8e-4
    assert plan.memory.budget_bytes == 75_000_000_000
    assert plan.env["NCCL_BUFFSIZE"] == "8388608"


def test_the_seed_000_profile_gives_gpus_by_size_and_keeps_its_numbers() -> None:
    for model, gpus in (("Qwen/Qwen2.5-3B", 1), (LLAMA, 1), ("meta-llama/Llama-3.1-70B", 4)):
        plan = _plan(load_profile("h100x4"), model=model, hours=8)
        assert plan.verdict.feasible
        assert plan.gpus.count == gpus
        assert plan.parallelism is (Parallelism.SINGLE if gpus == 1 else Parallelism.FSDP)
        assert (plan.adapter.rank, plan.optimizer.learning_rate) == (512, 8e-4)
        assert plan.batch.effective >= 32


def test_checkpointing_is_switched_on_only_where_memory_asks_for_it() -> None:
    small = _plan(resolved(), model="Qwen/Qwen2.5-0.5B", gpus="1xH100")
    large = _plan(resolved(), gpus="1xRTX-4090")
    assert not small.precision.gradient_checkpointing
    assert large.precision.gradient_checkpointing
    forced = _plan(resolved(gradient_checkpointing=False), gpus="1xRTX-4090")
    concession = _concession(forced, "gradient_checkpointing")
    assert (concession.wanted, concession.got) == (False, True)


def test_checkpointing_that_is_asked_for_stays_on_and_the_batch_with_it() -> None:
    plan = _plan(
        resolved(gradient_checkpointing=True, micro_batch_size=16, sample_packing=False), gpus="1xH100"
    )
    assert plan.precision.gradient_checkpointing
    assert plan.batch.micro == 16


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


def test_a_full_fine_tune_that_cannot_be_held_becomes_a_lora_at_its_own_rate() -> None:
    profile = resolved(method=Method.FULL, learning_rate=1e-5)
    plan = _plan(profile, gpus="1xRTX-4090")
    assert plan.method is Method.LORA
    assert plan.optimizer.learning_rate == pytest.approx(1e-4)
    assert _concession(plan, "method") is not None


def test_fsdp_takes_an_optimizer_that_it_can_shard() -> None:
    plan = _plan(resolved(optimizer=Optimizer.ADAMW_BNB_8BIT, fsdp_above="1B", gpu_strategy="all"))
    assert plan.optimizer.name is Optimizer.ADAMW_TORCH_8BIT
    assert "FSDP2" in _concession(plan, "optimizer").reason


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
    plan = _plan(on_all_gpus(), TaskType.GRPO, model, gpus="4xH100", hours=8)
    assert plan.verdict.feasible
    assert plan.parallelism is Parallelism.FSDP
    assert least <= plan.grpo.whole_layers <= most
    candidate = candidate_of(plan)
    assert candidate.gathered_layers == plan.grpo.whole_layers
    budget = plan.memory.budget_bytes
    assert plan.memory.total_bytes <= budget
    # One more does not fit.
    assert candidate.gathered_layers == plan.model.layers or not fits_memory(
        vary(candidate, gathered_layers=candidate.gathered_layers + 1), budget
    )


def test_weights_are_gathered_whole_only_to_generate() -> None:
    for task, targets in ((TaskType.INSTRUCT, {}), (TaskType.DPO, {}), (TaskType.GRPO, {"grpo_vllm": True})):
        profile = resolved(fsdp_above="1B", gpu_strategy="all", **targets)
        plan = _plan(profile, task, "Qwen/Qwen2.5-14B", gpus="4xH100", hours=8)
        assert not candidate_of(plan).gathered_layers


def test_a_full_fine_tune_by_rewards_is_sharded_and_generates_with_all_weights() -> None:
    """15 GB of weights, and states that only shards hold."""
    profile = resolved(method=Method.FULL, micro_batch_size=64, fsdp_above="1B", gpu_strategy="all")
    plan = _plan(profile, TaskType.GRPO, "Qwen/Qwen2.5-7B", gpus="4xH100", hours=8)
    assert plan.grpo.whole_layers == plan.model.layers
    assert plan.parallelism is Parallelism.FSDP


def test_grpo_batches_are_what_axolotl_accepts() -> None:
    for gpus in (1, 2, 3, 4, 8):
        plan = _plan(load_profile("steady"), TaskType.GRPO, "Qwen/Qwen2.5-3B", gpus=f"{gpus}xH100", hours=6)
        batch, generations = plan.batch, plan.grpo.generations
        per_gpu = batch.micro * batch.accumulation
        assert per_gpu % generations == 0
        assert per_gpu >= generations * batch.world_size
        if batch.effective != 32:
            assert "groups" in _concession(plan, "effective_batch_size").reason


def test_the_clock_decides_the_epochs_and_says_so() -> None:
    long, short = _plan(resolved(num_epochs=3), hours=8), _plan(resolved(num_epochs=3), hours=1, rows=100_000)
    assert long.steps.epochs == pytest.approx(3)
    assert short.steps.epochs < 3
    assert short.steps.wanted == pytest.approx(short.steps.per_epoch * 3, abs=1)
    concession = _concession(short, "num_epochs")
    assert "left for training" in concession.reason


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


def test_alpha_times_rate_is_guarded_where_the_profile_says_so() -> None:
    plan = _plan(resolved({"max_alpha_lr": 0.03}, lora_alpha=1024, learning_rate=8e-4))
    assert plan.optimizer.learning_rate == pytest.approx(0.03 / 1024, rel=1e-4)
    assert _concession(plan, "learning_rate") is not None


def test_the_rate_grows_with_the_gpus_as_seed_001_says() -> None:
    profile = resolved(lr_gpu_scale={2: 1.2, 4: 1.5}, learning_rate=2e-4, gpu_strategy="all")
    rates = [_plan(profile, gpus=f"{n}xH100").optimizer.learning_rate for n in (1, 2, 3, 4)]
    assert rates == pytest.approx([2e-4, 2.4e-4, 2.4e-4, 3e-4])


def test_warmup_takes_at_most_a_quarter_of_the_run() -> None:
    plan = _plan(resolved(warmup_steps=300, max_steps=100))
    assert plan.optimizer.warmup_steps == 25
    assert _concession(plan, "warmup_steps") is not None


def test_the_host_bounds_loaders_and_container() -> None:
    plan = _plan(on_all_gpus(), hardware=host("4xH100", cpu_cores=24, memory_bytes=200 * 10**9))
    assert plan.loader.workers == 6
    assert plan.container.cpus == "0-23"
    assert (plan.container.memory_bytes or 0) <= 200 * 10**9


def test_parallel_jobs_share_the_hosts_memory() -> None:
    """A profile that asks for more than the share of its GPUs is told in a concession."""
    hardware = host("8xH100", memory_bytes=800 * 10**9)
    plan = _plan(on_all_gpus(), hardware=hardware)
    assert plan.gpus.count == 4
    assert 0.4 * 800e9 < (plan.container.memory_bytes or 0) <= 0.5 * 800e9
    assert _concession(plan, "dataloader_num_workers") is not None
    given = hardware.model_copy(update={"gpus": hardware.gpus.take(4), "host_gpus": 8})
    alone = _plan(on_all_gpus(), hardware=given)
    assert (alone.container, alone.loader) == (plan.container, plan.loader)
    one = _plan(load_profile("h100x4"), hardware=host("4xH100", cpu_cores=64, memory_bytes=10**12))
    assert (one.gpus.count, one.loader.workers) == (1, 16)


def test_the_plan_concedes_what_the_engine_does_not_support() -> None:
    ema = resolved(ema_decay=0.999, gpu_strategy="all", fsdp_above="1B")
    native = resolved(
        engine=Engine.NATIVE, fp8=True, compile_mode=CompileMode.REDUCE_OVERHEAD, gradient_checkpointing=True
    )
    sharded, single = _plan(ema, gpus="4xH100"), _plan(ema, gpus="1xH100")
    sdxl = {"model": "x", "hours": 1, "rows": 30, "image_type": ImageModelType.SDXL}
    cases = [
        (sharded, "ema_decay", (0.999, None)),
        (single, "ema_decay", None),
        (_plan(native), "fp8", (True, False)),
        (_plan(native), "compile_mode", ("reduce-overhead", "max-autotune-no-cudagraphs")),
        (_plan(native, hardware=host("4xH100", cpu_cores=2)), "dataloader_num_workers", None),
        (_plan(load_profile("h100x4"), TaskType.IMAGE, **sdxl), "vae_batch_size", (64, 8)),
    ]
    for plan, field, expected in cases:
        concession = _concession(plan, field)
        assert (concession and (concession.wanted, concession.got)) == expected, field
    assert (sharded.ema, sharded.memory["average"]) == (None, 0)
    assert single.ema is not None
    assert not _plan(native).precision.fp8
    assert _plan(native).loader.workers == 0


def test_a_small_disk_keeps_fewer_checkpoints_but_always_one() -> None:
    profile = resolved(save_total_limit=8, lora_r=256)
    roomy = _plan(profile, hardware=host("1xH100", disk_free_bytes=10**12))
    tight = _plan(profile, hardware=host("1xH100", disk_free_bytes=40 * 10**9))
    none = _plan(profile, hardware=host("1xH100", disk_free_bytes=10**9))
    assert roomy.steps.keep_checkpoints == 8
    assert 1 <= tight.steps.keep_checkpoints < 8
    assert none.steps.keep_checkpoints == 1
    assert _concession(tight, "save_total_limit") is not None


def test_a_validator_that_penalises_divergence_costs_a_reference_pass() -> None:
    plain, kl = _plan(resolved()), _plan(resolved(), kl=0.5)
    assert kl.time.throughput < plain.time.throughput
    assert kl.memory["logits"] > plain.memory["logits"] or kl.batch.micro < plain.batch.micro


def test_the_references_pass_comes_first_only_where_that_saves_time() -> None:
    many = _plan(resolved(num_epochs=3), TaskType.DPO, hours=12)
    few = _plan(resolved(num_epochs=3), TaskType.DPO, hours=1, rows=200_000)
    assert many.dpo.precompute_reference
    assert not few.dpo.precompute_reference


@each("kind", list(ImageModelType))
def test_every_image_type_is_planned_for_its_engine(kind: ImageModelType) -> None:
    plan = _plan(load_profile("steady"), TaskType.IMAGE, "x", hours=1, rows=30, image_type=kind)
    assert plan.verdict.feasible
    assert plan.engine is (
        Engine.KOHYA if kind in (ImageModelType.SDXL, ImageModelType.FLUX) else Engine.AI_TOOLKIT
    )
    assert plan.image is not None
    if plan.engine is Engine.AI_TOOLKIT:
        assert plan.gpus.count == 1


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


def _quick(name: str = "x-8b", count: int | None = None, hours: float = 3, **given: Any) -> TrainingPlan:
    profile = given.pop("profile", "steady")
    task = given.pop("task", TaskType.INSTRUCT)
    return offered(name, count, hours, task, host(), profile, **given)


def offered(
    name: str,
    count: int | None,
    hours: float,
    task: TaskType,
    hardware: Hardware,
    profile: str,
    rows: int | None = None,
    image: ImageModelType | None = None,
) -> TrainingPlan:
    """All of the plan of which an offer sees the summary."""
    hours = usable_hours(hours)
    rows = None if rows is None else max(rows, 0)
    model, data = facts_from_name(name, count, image), assumed_facts(task, rows, hours, image)
    spec = TaskSpec(task_type=task, hours=hours, image_type=image)
    loaded = load_profile(profile)
    plan = plan_task(spec, model, data, hardware, loaded, stated_params=count, explained=False)
    summary = quick_plan(
        model,
        hours,
        task,
        hardware,
        resolve_profile(loaded, task, model),
        image_type=image,
        rows=rows,
        stated_params=count,
    )
    time, steps = plan.time, plan.steps
    training = time["train"] + time["evaluate"] + time["save"]
    assert summary == PlanSummary(
        code=plan.verdict.code,
        reason=plan.verdict.reason,
        gpus=plan.gpus.count,
        gpu_kind=plan.gpus.kind.name,
        epochs=steps.epochs,
        share=min(steps.total / (steps.wanted or steps.total), 1.0) if steps.wanted or steps.total else 0.0,
        total_s=time.total_s,
        slack_s=time.slack_s,
        budget_s=time.deadline_s - time.reserve_s,
        reference_s=time["reference"],
        around_s=time.total_s - training,
        rows=plan.data.rows,
    )
    return plan


def test_an_offers_summary_is_that_of_the_whole_plan() -> None:
    """`offered` compares them; over sizes from toys to giants, all types, and small GPUs."""
    random = Random(56)
    for _ in range(400):
        task, params = random.choice(list(TaskType)), round(10 ** random.uniform(6.5, 12.8))
        image = random.choice(list(ImageModelType)) if not task.is_text else None
        family = random.choice(("Llama-3", "Qwen2.5", "mixtral", "deepseek-v2", "gpt2", "unheard-of"))
        offered(
            f"someone/{family}-{params / 1e9:.1f}b",
            random.choice((None, params)),
            random.choice((0.01, 0.5, 1, 3, 8, random.uniform(0.1, 12))),
            task,
            Hardware(gpus=parse_gpus(random.choice(("1xL4", "2xA6000", "4xH100", "8xH100")))),
            random.choice(("h100x4", "h100x8", "h100x4-strategy", "steady", "h100-fast")),
            random.choice((None, 0, 20, 5000)),
            image,
        )


@each(
    ("given", "code"),
    [
        ({"name": "who/knows"}, Refusal.UNKNOWN_SIZE),
        ({"name": "who/knows", "count": 0}, Refusal.UNKNOWN_SIZE),
        ({"count": 10**15}, Refusal.ABSURD_SIZE),
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
    plan = _quick(**given)
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


def test_old_gpus_lose_what_they_do_not_support() -> None:
    turing = GPU_KINDS["RTX-3090"].model_copy(
        update={"name": "T4", "compute_capability": (7, 5), "memory_bytes": 15 * 10**9}
    )
    hardware = Hardware(gpus=GpuSet(kind=turing, count=1))
    profile = resolved(fp8=True, attention="flash_attention_3")
    plan = _plan(profile, model="Qwen/Qwen2.5-0.5B", hardware=hardware, hours=8)
    assert plan.verdict.feasible
    assert not plan.precision.bf16
    assert plan.precision.fp16
    assert {"bf16", "fp8", "attention"} <= {one.field for one in plan.concessions}


@pytest.mark.parametrize(
    ("engine", "task", "got"),
    [
        ("native", TaskType.GRPO, Engine.AXOLOTL),
        ("native", TaskType.INSTRUCT, Engine.NATIVE),
        ("kohya", TaskType.CHAT, Engine.AXOLOTL),
    ],
)
def test_an_engine_that_cannot_do_the_task_gives_way(engine: str, task: TaskType, got: Engine) -> None:
    plan = _plan(resolved(engine=engine), task, "Qwen/Qwen2.5-0.5B")
    assert plan.engine is got
    assert (_concession(plan, "engine") is None) is (engine == got.value)


def test_the_cpu_demo_profile_plans_on_a_cpu() -> None:
    plan = _plan(load_profile("cpu-demo"), model="tiny-10m", gpus="cpu", hours=0.5, rows=100)
    assert plan.verdict.feasible
    assert plan.memory["cuda"] == 0
    assert not plan.precision.bf16


PAGE = (Path(__file__).parents[3] / "docs" / "planning.md").read_text(encoding="utf-8")


@each("word", [*Refusal, *GpuStrategy])
def test_every_refusal_and_every_strategy_is_explained(word: str) -> None:
    assert f"| `{word}` |" in PAGE
