"""From the chosen candidate to the one plan: every number, and the reason for each."""

from __future__ import annotations

from collections.abc import Iterator

from core.budget import TimeBreakdown, Verdict
from core.choices import Engine, Method, Parallelism
from core.hardware import Hardware
from core.plan import TrainingPlan
from core.plan_parts import (
    AdapterPlan,
    BatchPlan,
    DpoPlan,
    FsdpPlan,
    GrpoPlan,
    ImagePlan,
    PrecisionPlan,
    SequencePlan,
    StepsPlan,
)
from core.planning.concede import concessions, epochs_between_files, no_fp8
from core.planning.fit import Fit, Timed, budget_of
from core.planning.host import container_plan, host_concessions, launch_plan, loader_plan
from core.planning.learning import (
    alpha_of,
    ema_plan,
    guarded_rate,
    learning_concessions,
    optimizer_plan,
    plateau_plan,
    search_plan,
    warmup,
)
from core.planning.memory import memory_of
from core.planning.reasons import reasons_for
from core.planning.setup import Setup
from core.planning.start import VLLM_SHARE
from core.planning.wishes import Wish
from core.profile.annotations import Case
from core.profile.explain import annotate
from core.tasks import TaskType


def plan_of(wish: Wish, fit: Fit, hardware: Hardware, explained: bool = True) -> TrainingPlan:
    """`explained=False` leaves out what only a reader needs: notes and reasons."""
    timed, setup = fit.best, fit.best.setup
    targets = wish.targets
    budget = budget_of(wish.limits, wish.kind.memory_bytes)
    rate, _, _ = guarded_rate(wish, timed)
    warmup_steps, _ = warmup(wish, timed.schedule.total)
    given = [
        *concessions(wish, fit, budget),
        *learning_concessions(wish, timed),
        *host_concessions(wish, hardware, setup.world),
    ]
    return TrainingPlan(
        task=wish.task,
        model=wish.model,
        data=wish.data,
        available=hardware.gpus,
        gpus=hardware.gpus.take(setup.world),
        profile=wish.profile.name,
        profile_digest=wish.profile.digest,
        engine=wish.engine,
        method=setup.method,
        adapter=_adapter(wish, setup),
        parallelism=setup.parallelism,
        fsdp=_fsdp(wish, setup),
        batch=_batch(setup),
        sequence=_sequence(wish, timed),
        optimizer=optimizer_plan(wish, timed, rate, warmup_steps),
        steps=_steps(wish, timed),
        precision=_precision(wish, setup),
        loader=loader_plan(wish, hardware, setup.world),
        ema=ema_plan(wish, setup),
        plateau=plateau_plan(wish),
        lr_search=search_plan(wish, timed, rate),
        dpo=_dpo(wish, setup),
        grpo=_grpo(wish, setup),
        image=_image(wish, timed),
        container=container_plan(wish, hardware, setup.world),
        env=wish.profile.env,
        launch=launch_plan(wish, setup.world),
        seed=targets.seed,
        engine_config=_raw(wish),
        memory=memory_of(setup, budget),
        time=time_of(timed),
        verdict=Verdict(feasible=fit.code is None, code=fit.code, reason=fit.reason),
        concessions=tuple(given),
        notes=tuple(_notes(wish, timed)) if explained else (),
        reasons=reasons_for(wish, fit, given) if explained else {},
    )


def _adapter(wish: Wish, setup: Setup) -> AdapterPlan | None:
    if setup.method is Method.FULL:
        return None
    targets = wish.targets
    return AdapterPlan(
        rank=setup.rank,
        alpha=alpha_of(wish, setup.rank),
        dropout=targets.lora_dropout,
        target_modules=tuple(targets.lora_target_modules or ()),
        rslora=targets.rslora,
        dora=targets.dora,
        loraplus_lr_ratio=targets.loraplus_lr_ratio,
        text_encoder=bool(setup.picture and setup.picture.text_adapter),
        fp32=targets.adapter_fp32,
        params=setup.adapter_params,
    )


def _fsdp(wish: Wish, setup: Setup) -> FsdpPlan | None:
    if setup.parallelism is not Parallelism.FSDP:
        return None
    targets = wish.targets
    return FsdpPlan(
        reshard_after_forward=targets.fsdp_reshard_after_forward,
        forward_prefetch=targets.fsdp_forward_prefetch,
        limit_all_gathers=targets.fsdp_limit_all_gathers,
        backward_prefetch=targets.fsdp_backward_prefetch,
    )


def _batch(setup: Setup) -> BatchPlan:
    return BatchPlan(
        micro=setup.micro,
        accumulation=setup.accumulation,
        world_size=setup.world,
        eval_micro=setup.eval_micro,
    )


def _sequence(wish: Wish, timed: Timed) -> SequencePlan:
    seq = timed.seq
    return SequencePlan(
        length=seq.length,
        packing=seq.packing,
        group_by_length=wish.targets.group_by_length and not seq.packing and not wish.model.is_image,
        pad_to_length=seq.packing,
        prompt_limit=seq.prompt_limit,
        completion_limit=seq.completion_limit,
        dropped_share=min(max(seq.dropped_share, 0.0), 1.0),
        per_epoch=seq.per_epoch,
        tokens_per_epoch=round(seq.per_epoch * (seq.length if wish.model.is_image else seq.padded)),
    )


def _steps(wish: Wish, timed: Timed) -> StepsPlan:
    schedule, targets = timed.schedule, wish.targets
    return StepsPlan(
        epochs=schedule.epochs,
        per_epoch=schedule.per_epoch,
        total=schedule.total,
        wanted=schedule.wanted,
        eval_every=schedule.eval_every,
        save_every=schedule.save_every,
        log_every=max(min(schedule.total // 100, 10), 1),
        eval_rows=schedule.eval_rows,
        eval_metric=targets.eval_metric,
        keep_checkpoints=schedule.keep,
        early_stopping_patience=targets.early_stopping_patience if schedule.eval_rows else None,
        load_best=targets.load_best and schedule.eval_rows > 0,
    )


def _precision(wish: Wish, setup: Setup) -> PrecisionPlan:
    targets, kind, supervised = wish.targets, wish.kind, _supervised(wish)
    on_gpu = kind.compute_capability > (0, 0)
    half = targets.bf16 and not kind.has_bf16
    kernels = targets.lora_kernels if targets.lora_kernels is not None else on_gpu
    return PrecisionPlan(
        bf16=targets.bf16 and kind.has_bf16,
        fp16=targets.fp16 or half,
        tf32=targets.tf32 and kind.compute_capability >= (8, 0),
        fp8=setup.fp8 and no_fp8(setup) is None,
        attention=setup.attention,
        compile_mode=setup.compile_mode,
        gradient_checkpointing=setup.checkpointing,
        activation_offload=setup.offload,
        # The KL to the base model is computed from the logits, which a fused loss never has.
        fused_loss=targets.fused_loss and supervised and not wish.task.kl_coefficient,
        liger=targets.liger,
        lora_kernels=kernels and supervised and setup.method is not Method.FULL,
        neftune_alpha=targets.neftune_alpha,
    )


def _supervised(wish: Wish) -> bool:
    return wish.task.task_type in (TaskType.INSTRUCT, TaskType.CHAT)


def _dpo(wish: Wish, setup: Setup) -> DpoPlan | None:
    if wish.task.task_type is not TaskType.DPO:
        return None
    return DpoPlan(beta=wish.targets.dpo_beta, precompute_reference=setup.reference_ready)


def _grpo(wish: Wish, setup: Setup) -> GrpoPlan | None:
    if wish.task.task_type is not TaskType.GRPO:
        return None
    targets = wish.targets
    return GrpoPlan(
        beta=targets.grpo_beta,
        generations=targets.grpo_generations,
        temperature=targets.grpo_temperature,
        vllm=targets.grpo_vllm,
        whole_layers=setup.whole if setup.gathers_to_generate else 0,
        vllm_memory_share=VLLM_SHARE,
    )


def _image(wish: Wish, timed: Timed) -> ImagePlan | None:
    picture, targets = timed.setup.picture, wish.targets
    if picture is None:
        return None
    return ImagePlan(
        resolution=picture.resolution,
        repeats=targets.image_repeats or wish.data.image_repeats,
        vae_batch=picture.vae_batch,
        loss=targets.image_loss,
        huber_c=targets.huber_c,
        min_snr_gamma=targets.min_snr_gamma,
        noise_offset=targets.noise_offset,
        scale_weight_norms=targets.scale_weight_norms,
        caption_dropout=targets.caption_dropout,
        guidance_scale=targets.guidance_scale,
        timestep_sampling=targets.timestep_sampling,
        flow_shift=targets.flow_shift,
        cache_text=picture.text_put_away and targets.caption_dropout == 0,
        quantize_base=picture.quantized,
        save_every_epochs=epochs_between_files(timed),
        conv_rank=targets.conv_rank,
        conv_alpha=targets.conv_alpha,
    )


def _raw(wish: Wish) -> dict[str, object]:
    configs = wish.profile.engine_config
    return {
        Engine.AXOLOTL: configs.axolotl,
        Engine.KOHYA: configs.kohya,
        Engine.AI_TOOLKIT: configs.ai_toolkit,
        Engine.NATIVE: configs.native,
    }[wish.engine]  # type: ignore[return-value]


def time_of(timed: Timed, measured: bool = False) -> TimeBreakdown:
    """From now to the deadline."""
    setup = timed.setup
    effective = setup.micro * setup.accumulation * setup.world
    peak = timed.step.flops / (timed.rate.step_s * setup.kind.bf16_flops) if timed.rate.step_s else 0.0
    return TimeBreakdown(
        phases=tuple(one.phase() for one in timed.stretches),
        deadline_s=timed.deadline_s,
        reserve_s=timed.reserve_s,
        step_s=timed.rate.step_s,
        throughput=effective * timed.seq.trained / timed.rate.step_s if timed.rate.step_s else 0.0,
        utilisation=min(max(peak, 0.0), 1.0),
        measured=measured,
    )


def _notes(wish: Wish, timed: Timed) -> Iterator[str]:
    """What today's engines do with the profile's words, and what of the facts is a guess."""
    case = Case(wish.task.task_type, wish.task.image_type, wish.engine)
    for note in annotate(wish.profile, case):
        yield f"{note.path.removeprefix('targets.')}: {note.text}"
    data = wish.data
    if not wish.model.is_image and data.lengths_confidence.value == "guess":
        yield "token lengths are assumed, not measured"
    if timed.seq.dropped_share > 0.005:
        yield f"{timed.seq.dropped_share:.1%} of the rows exceed {timed.seq.length} tokens and are dropped"
