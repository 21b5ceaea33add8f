"""Requirements: the profile's targets made concrete, and the candidate at which the search begins.

Whatever no amount of memory could give (a rank above the limit, fp8 on a GPU without it, a sequence beyond
the model's window) gives way here. The first candidate takes the rest as if memory were endless.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pydantic import JsonValue, ValidationError

from core.data.facts import DatasetFacts
from core.domain.choices import (
    Attention,
    CompileMode,
    Engine,
    EvalMetric,
    LrSchedule,
    Method,
    Optimizer,
    Parallelism,
)
from core.domain.errors import ConfigError, Problem
from core.domain.hardware import GpuKind
from core.domain.tasks import TaskType
from core.domain.tournament_rules import BANDS
from core.models.facts import ModelFacts
from core.models.image_families import IMAGE_FAMILIES, PictureRecipe
from core.models.kernels import LORA_KERNELS, LigerPart, liger_parts
from core.models.shapes import RankFactors
from core.planning.budget import Concession, conceded
from core.planning.candidate import ImageCandidate, LossKind, ModelShape, RunCandidate, nccl_buffer, shape_of
from core.planning.conditions import JobConditions, LearnedBounds
from core.planning.plan import LrSearchPlan, TaskSpec
from core.planning.time.schedule import held_out
from core.planning.time.sequences import (
    BatchShape,
    Sequences,
    image_sequences,
    natural_length,
    sequence_options,
    text_sequences,
)
from core.profile.limits import ProfileLimits
from core.profile.resolve import engine_for
from core.profile.schema import ResolvedProfile
from core.profile.targets import Targets


class Requirements(NamedTuple):
    """The profile's targets made concrete for one task, model and kind of GPU."""

    task: TaskSpec
    model: ModelFacts
    data: DatasetFacts
    profile: ResolvedProfile
    kind: GpuKind
    engine: Engine
    method: Method
    shape: ModelShape
    rank: int
    #: On the rank of layers by name.
    rank_factors: RankFactors
    length: int
    eval_rows: int
    attention: Attention
    compile_mode: CompileMode | None
    width: int
    fp8: bool
    liger: frozenset[LigerPart]
    lora_kernels: bool
    reference_ready: bool
    #: Concessions that hold for any number of GPUs.
    concessions: tuple[Concession, ...]
    conditions: JobConditions
    #: The effective batch of the profile where it left too few steps (`planner.with_enough_steps`).
    asked_batch: int | None = None
    #: Of the picture trainer, if that is what trains.
    recipe: PictureRecipe | None = None

    @property
    def targets(self) -> Targets:
        return self.profile.targets

    @property
    def limits(self) -> ProfileLimits:
        return self.profile.limits

    @property
    def learned(self) -> LearnedBounds:
        return self.conditions.learned

    @property
    def node_gpus(self) -> int:
        return self.conditions.hardware.gpus.per_node

    @property
    def most_nodes(self) -> int:
        """Image engines train on one machine, and generating on several was never tried."""
        several = self.task.task_type.is_text and not self.task.task_type.generates
        return self.targets.nodes if several else 1

    @property
    def training_rows(self) -> int:
        return self.data.rows - self.eval_rows

    def effective(self, world: int) -> int:
        """Sequences per step that the profile asks for on so many GPUs, before rounding."""
        asked = self.targets.effective_batch_size
        if asked is None:
            asked = self.targets.micro_batch_size * self.targets.gradient_accumulation_steps * world
        return min(asked, self.learned.batch or asked)

    @property
    def micro_target(self) -> int:
        asked = min(self.targets.micro_batch_size, self.limits.max_micro_batch)
        return min(asked, self.learned.micro or asked)

    def per_gpu(self, world: int) -> int:
        """Sequences of one GPU in one step, rounded; for GRPO, complete groups of completions."""
        share = max(round(self.effective(world) / world), 1)
        if not self.task.task_type.generates:
            return share
        group = self.targets.grpo_generations
        return max(math.ceil(share / group) * group, group * world)

    def sequences(self, candidate: RunCandidate) -> Sequences:
        if candidate.image is not None:
            repeats = self.targets.image_repeats or self.data.image_repeats
            if self.recipe is not None:
                repeats = BANDS
            return image_sequences(self.data, self.model, candidate.image.resolution, repeats)
        batch = BatchShape(candidate.micro, candidate.effective, candidate.ordered_passes)
        options, rows = sequence_options(self.targets), self.training_rows
        if self.model.packing_problem:
            options = options._replace(packing=False)  # rows of one sequence would see each other
        return text_sequences(self.data, options, candidate.length, rows, batch)


def requirements_for(
    task: TaskSpec,
    model: ModelFacts,
    data: DatasetFacts,
    profile: ResolvedProfile,
    conditions: JobConditions,
) -> Requirements:
    """Make the targets concrete, and concede what no amount of memory could give, and what attempts have
    shown not to fit."""
    kind, learned, without = conditions.hardware.gpus.kind, conditions.learned, conditions.workarounds
    profile = _with_learned_gpus(profile, learned)
    given: list[Concession] = []
    recipe = _picture_recipe(task, profile, conditions)
    if recipe is not None:
        engine, profile = Engine.PICTURES, _with_recipe(task, profile, recipe)
    else:
        engine = _engine(profile.targets, task, model, given)
    if engine is Engine.AXOLOTL and kind.compute_capability == (0, 0):
        profile = _without_compiled_losses(profile, task, given)
    targets, limits = profile.targets, profile.limits
    compile_mode = targets.compile_mode if kind.compute_capability >= (7, 0) else None
    width = _width(targets, kind, given)
    length = _length(data, model, targets, limits, given)
    length = min(length, learned.length or length)
    rank = _lora_rank(targets, limits, given)
    rank_factors = _rank_factors(profile, model, rank, given)
    method = learned.method or _method(model, targets, given)
    attention = without.attention or _attention(model, targets, conditions, given)
    fp8 = _fp8(targets, kind, given)
    liger, lora_kernels = frozenset[LigerPart](), False
    if not without.no_liger:
        liger = _liger(task.task_type, engine, model, targets, kind, given)
    if not without.no_lora_kernels:
        lora_kernels = _lora_kernels(task.task_type, model, targets, kind, given)
    if targets.sample_packing and model.packing_problem:
        given.append(conceded("sample_packing", True, False, model.packing_problem))
    if targets.compile_mode is not None and compile_mode is None:
        given.append(conceded("compile_mode", targets.compile_mode.value, None, f"not on {kind.name}"))
    return Requirements(
        task=task,
        model=model,
        data=data,
        profile=profile,
        kind=kind,
        engine=engine,
        method=method,
        shape=shape_of(model, tuple(targets.lora_target_modules or ()), rank_factors),
        rank=rank,
        rank_factors=rank_factors,
        length=length,
        eval_rows=held_out(task.task_type, data.rows, targets),
        attention=attention,
        compile_mode=compile_mode,
        width=width,
        fp8=fp8,
        liger=liger,
        lora_kernels=lora_kernels,
        # A full fine-tune saves its second copy this way; for an adapter the clock decides later.
        reference_ready=task.task_type.has_pairs and method is Method.FULL,
        concessions=(*given, *learned.steps),
        conditions=conditions,
        recipe=recipe,
    )


def _picture_recipe(
    task: TaskSpec, profile: ResolvedProfile, conditions: JobConditions
) -> PictureRecipe | None:
    """The family's recipe with the operator's changes; None where the picture trainer does not train."""
    flow = IMAGE_FAMILIES[task.image_type].flow if task.image_type is not None else None
    if flow is None or not conditions.pictures:
        return None
    changes = profile.engine_config.pictures
    try:
        return PictureRecipe.model_validate({**flow.recipe.model_dump(), **changes})
    except ValidationError as error:
        where = [".".join(map(str, details["loc"])) for details in error.errors()]
        problems = [
            Problem(f"engine_config.pictures.{key}", str(changes.get(key)), details["msg"])
            for key, details in zip(where, error.errors(), strict=True)
        ]
        raise ConfigError(f"profile {profile.name}", problems) from None


def _with_recipe(task: TaskSpec, profile: ResolvedProfile, recipe: PictureRecipe) -> ResolvedProfile:
    """The profile as the picture trainer follows it, on one GPU, with pictures as they are scored."""
    assert task.image_type is not None
    flow = IMAGE_FAMILIES[task.image_type].flow
    asked = profile.engine_config.pictures.get("checkpointing")
    update = {
        "lora_r": recipe.rank,
        "lora_alpha": recipe.alpha,
        "learning_rate": recipe.rate,
        "gradient_accumulation_steps": recipe.batch,
        "micro_batch_size": 1,
        "effective_batch_size": None,
        "optimizer": Optimizer.ADAMW_TORCH,
        "lr_scheduler": LrSchedule.COSINE,
        "min_lr_ratio": 0.0,
        "warmup_steps": recipe.warm_up_steps,
        "weight_decay": recipe.weight_decay,
        "max_grad_norm": recipe.clip,
        "ema_decay": recipe.ema_decay or None,
        "num_epochs": None,
        "max_steps": recipe.max_steps,
        "resolutions": [1024],
        "vae_batch_size": 1,
        "caption_dropout": 0.0,
        "text_encoder_lr": None,
        "quantize_base": flow is not None and flow.twin,
        "gradient_checkpointing": asked if isinstance(asked, bool) else None,
        "compile_mode": None,
        "least_steps": None,
        "eval_steps": None,
        "save_steps": None,
        "early_stopping_patience": None,
    }
    limits = profile.limits.model_copy(
        update={"min_gpus": 1, "max_gpus": 1, "max_lora_r": max(recipe.rank, profile.limits.max_lora_r)}
    )
    targets = profile.targets.model_copy(update=update)
    return profile.model_copy(update={"targets": targets, "limits": limits})


def _with_learned_gpus(profile: ResolvedProfile, learned: LearnedBounds) -> ResolvedProfile:
    if learned.gpus is None:
        return profile
    least = min(max(profile.limits.min_gpus, learned.gpus), profile.limits.max_gpus)
    return profile.model_copy(update={"limits": profile.limits.model_copy(update={"min_gpus": least})})


def _without_compiled_losses(
    profile: ResolvedProfile, task: TaskSpec, given: list[Concession]
) -> ResolvedProfile:
    """On a CPU Axolotl's chunked loss is compiled by a C++ compiler, which an image need not have, and Liger
    is Triton."""
    names = [name for name in ("fused_loss", "liger") if getattr(profile.targets, name)]
    if task.task_type.is_supervised:
        reason = "Axolotl's needs a GPU, or a C++ compiler"
        given.extend(conceded(name, True, False, reason) for name in names)
    targets = profile.targets.model_copy(update=dict.fromkeys(names, False))
    return profile.model_copy(update={"targets": targets})


def lr_search(needs: Requirements) -> LrSearchPlan | None:
    """Only with held-out rows scored in the validator's metric, and in an engine that can undo its steps:
    pictures' cannot, and have no such rows."""
    targets = needs.targets
    scored = needs.eval_rows > 0 and targets.eval_metric is EvalMetric.VALIDATOR
    if targets.lr_search_share <= 0 or not scored:
        return None
    return LrSearchPlan(share=targets.lr_search_share, most=targets.lr_search_most)


def _engine(targets: Targets, task: TaskSpec, model: ModelFacts, given: list[Concession]) -> Engine:
    engine = engine_for(targets, task.task_type, task.image_type)
    if engine is Engine.NATIVE and (task.task_type.generates or model.native_problem):
        engine = Engine.AXOLOTL
    if targets.engine is not None and targets.engine is not engine:
        reason = f"{targets.engine.value} does not train {task.image_type or task.task_type}"
        if model.native_problem and not task.task_type.generates:
            reason = model.native_problem
        given.append(conceded("engine", targets.engine.value, engine.value, reason))
    return engine


def _width(targets: Targets, kind: GpuKind, given: list[Concession]) -> int:
    if targets.bf16 and not kind.has_bf16:
        given.append(conceded("bf16", True, False, f"{kind.name} has no bfloat16; float16 instead"))
    return 2 if targets.bf16 or targets.fp16 else 4


def _length(
    data: DatasetFacts, model: ModelFacts, targets: Targets, limits: ProfileLimits, given: list[Concession]
) -> int:
    most = max(min(model.max_position, limits.max_sequence_len), 1)
    if targets.sequence_len is None or model.is_image or data.task_type.generates:
        return natural_length(data, targets, most)
    if targets.sequence_len > most:
        window = model.max_position <= limits.max_sequence_len
        why = f"the model's window is {most}" if window else f"limits.max_sequence_len is {most}"
        given.append(conceded("sequence_len", targets.sequence_len, most, why))
    return min(targets.sequence_len, most)


def _method(model: ModelFacts, targets: Targets, given: list[Concession]) -> Method:
    if model.is_image and targets.method not in (None, Method.LORA):
        given.append(conceded("method", targets.method.value, "lora", "validators take image adapters only"))
    return asked_method(model, targets)


def asked_method(model: ModelFacts, targets: Targets) -> Method:
    if model.is_image:
        return Method.LORA
    if targets.method is not None:
        return targets.method
    small = targets.full_below is not None and model.params_total < targets.full_below
    return Method.FULL if small else Method.LORA


#: vLLM's share of the GPU while it generates, by parameters below: as the text tournament's winner has it.
VLLM_SHARES = ((2e9, 0.4), (4e9, 0.35), (6e9, 0.4), (9e9, 0.5), (12e9, 0.6), (math.inf, 0.8))
#: Where nothing is asked for: the largest model, and the head sizes that its attention kernels have.
VLLM_MOST_PARAMS = 15e9
VLLM_HEADS = frozenset((64, 80, 96, 112, 128, 192, 256))
#: Replacements under FSDP2, which shards neither bitsandbytes' states nor paged ones.
SHARDABLE: dict[Optimizer, Optimizer] = {
    Optimizer.ADAMW_BNB_8BIT: Optimizer.ADAMW_TORCH_8BIT,
    Optimizer.PAGED_ADAMW_8BIT: Optimizer.ADAMW_TORCH_8BIT,
    Optimizer.PAGED_ADAMW_32BIT: Optimizer.ADAMW_TORCH_FUSED,
    Optimizer.LION_8BIT: Optimizer.ADAMW_TORCH_8BIT,
    Optimizer.ADAFACTOR: Optimizer.ADAMW_TORCH_8BIT,
}
#: In kohya's latent cache, whatever is asked for: more gains nothing and costs 2.6 GB per image in fp32.
MOST_VAE_BATCH = 8
#: After memory ran out at the first resolution.
RETRY_VAE_BATCH = 4


def first_candidate(needs: Requirements, world: int) -> RunCandidate:
    """The requirements on so many GPUs, as if memory were endless. Concessions are measured against it."""
    targets, task = needs.targets, needs.task.task_type
    per_gpu = needs.per_gpu(world)
    micro = largest_divisor(per_gpu, needs.micro_target)
    sharded = shards_as_required(needs, world)
    grpo = task.generates
    completion = min(targets.grpo_max_completion, max(needs.length - 64, 1)) if grpo else 0
    return RunCandidate(
        task=task,
        engine=needs.engine,
        method=needs.method,
        shape=needs.shape,
        kind=needs.kind,
        world=world,
        node_gpus=needs.node_gpus,
        network=targets.node_network * 1e9 / 8,
        parallelism=_parallelism(world, sharded),
        nccl_buffer=nccl_buffer(needs.profile.env),
        hybrid=sharded and shards_within_nodes(needs, world),
        micro=micro,
        accumulation=per_gpu // micro,
        eval_micro=1,
        length=needs.length,
        completion=completion,
        rank=0 if needs.method is Method.FULL else needs.rank,
        dropout=targets.lora_dropout > 0,
        optimizer=SHARDABLE.get(targets.optimizer, targets.optimizer) if sharded else targets.optimizer,
        fp32_master=False,
        width=needs.width,
        checkpointing=targets.gradient_checkpointing is True or needs.learned.checkpointing,
        attention=needs.attention,
        loss=_loss_kind(needs),
        liger=needs.liger,
        reshard=targets.fsdp_reshard_after_forward,
        compile_mode=needs.compile_mode,
        fp8=needs.fp8,
        reference_ready=needs.reference_ready,
        vllm_share=_vllm_share(needs),
        vllm_sleep=targets.grpo_vllm is not False and grpo,
        generations=targets.grpo_generations,
        kl=(grpo and targets.grpo_beta > 0) or bool(needs.task.kl_coefficient),
        prompt_kl=grpo and targets.grpo_prompt_kl > 0,
        together=together if (together := needs.learned.together or 0) < per_gpu else 0,
        gathered_layers=0,
        ema=targets.ema_decay is not None,
        image=_image_candidate(needs),
    )


def _vllm_share(needs: Requirements) -> float:
    """0 where vLLM does not generate. Unless the profile asks for it, large models, heads that it may not
    take, and bases in 4 bits, which adapters cannot be added to unchanged, are left to the trainer."""
    wanted, params = needs.targets.grpo_vllm, needs.model.params_total
    most = 0.0 if needs.conditions.workarounds.no_vllm else needs.learned.vllm_share
    never = wanted is False or most == 0 or needs.kind.compute_capability == (0, 0)
    if never or not needs.task.task_type.generates:
        return 0.0
    small = params < VLLM_MOST_PARAMS and needs.model.head_dim in VLLM_HEADS
    plain = small and needs.method is not Method.QLORA
    if wanted is None and not (needs.conditions.vllm and plain):
        return 0.0
    share = next(share for below, share in VLLM_SHARES if params < below)
    return share if most is None else min(share, most)


def _loss_kind(needs: Requirements) -> LossKind:
    """DPO and GRPO compute log-probs from logits whatever the SFT loss is set to. The KL to the base needs
    them too. DPO's are planned for all tokens: how many are the answers' differs from batch to batch."""
    task = needs.task
    if task.task_type.is_rl or task.kl_coefficient or not needs.targets.fused_loss:
        return LossKind.FULL
    chunked = needs.engine is not Engine.NATIVE and LigerPart.LOSS not in needs.liger
    return LossKind.CHUNKED if chunked else LossKind.FUSED


def _parallelism(world: int, sharded: bool) -> Parallelism:
    if world == 1:
        return Parallelism.SINGLE
    return Parallelism.FSDP if sharded else Parallelism.DDP


def can_shard(needs: Requirements, world: int) -> bool:
    """Image engines have no FSDP, and neither has a CPU."""
    return world > 1 and not needs.model.is_image and needs.kind.compute_capability > (0, 0)


def shards_as_required(needs: Requirements, world: int) -> bool:
    above = needs.targets.fsdp_above
    asked = above is not None and needs.model.params_total >= above
    return (asked or needs.learned.sharded) and can_shard(needs, world)


def shards_within_nodes(needs: Requirements, world: int) -> bool:
    """Return whether there are several nodes, with several GPUs each, which have room for all the weights."""
    return 1 < needs.node_gpus < world and not needs.learned.over_nodes


def _image_candidate(needs: Requirements) -> ImageCandidate | None:
    if needs.model.image is None:
        return None
    targets = needs.targets
    encoders = bool(targets.text_encoder_lr) and needs.engine is Engine.KOHYA
    vae, sides = targets.vae_batch_size, tuple(sorted(set(targets.resolutions)))
    if (most := needs.learned.resolution) is not None:
        sides = tuple(side for side in sides if side <= most) or (most,)
        vae = min(vae, RETRY_VAE_BATCH)
    return ImageCandidate(
        facts=needs.model.image,
        resolutions=sides,
        vae_batch=min(vae, MOST_VAE_BATCH) if needs.engine is Engine.KOHYA else vae,
        text_offloaded=not encoders and targets.caption_dropout == 0,
        text_adapter=encoders,
        quantized=targets.quantize_base is True,
        twin=needs.engine is Engine.PICTURES and targets.quantize_base is True,
    )


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor up to `most`: as a micro batch, accumulation makes up exactly for the rest."""
    return next(size for size in range(min(number, max(most, 1)), 0, -1) if number % size == 0)


def divisors(number: int, most: int) -> list[int]:
    """The divisors up to `most`, largest first."""
    return [size for size in range(min(number, most), 0, -1) if number % size == 0]


#: Triton compiles for these GPUs and later ones.
TRITON_LEAST = (8, 0)


def _attention(
    model: ModelFacts, targets: Targets, conditions: JobConditions, given: list[Concession]
) -> Attention:
    supported, kind = model.attention, conditions.hardware.gpus.kind
    best = Attention.FLASH_2 if kind.compute_capability >= (8, 0) else Attention.SDPA
    best = best if supported is Attention.FLASH_2 else supported
    if best is Attention.FLASH_2 and conditions.flash_3 and kind.compute_capability[0] == 9:
        best = Attention.FLASH_3
    asked = targets.attention
    if asked is None:
        return best
    if supported is not Attention.FLASH_2 and asked not in (supported, Attention.EAGER):
        given.append(
            conceded("attention", asked.value, best.value, f"{model.architecture} does not support it")
        )
        return best
    hopper_only = asked is Attention.FLASH_3 and kind.compute_capability < (9, 0)
    needs_ampere = asked in (Attention.FLASH_2, Attention.FLASH_3, Attention.FLEX)
    if hopper_only or (needs_ampere and kind.compute_capability < (8, 0)):
        given.append(conceded("attention", asked.value, best.value, f"{kind.name} cannot run it"))
        return best
    return asked


def _fp8(targets: Targets, kind: GpuKind, given: list[Concession]) -> bool:
    if targets.fp8 and not kind.has_fp8:
        given.append(conceded("fp8", True, False, f"{kind.name} has no fp8 tensor cores"))
    return targets.fp8 and kind.has_fp8


def _liger(
    task: TaskType,
    engine: Engine,
    model: ModelFacts,
    targets: Targets,
    kind: GpuKind,
    given: list[Concession],
) -> frozenset[LigerPart]:
    """The parts that Liger computes. Unset: none for GRPO, whose time goes into single tokens; what its
    launches cost there is not known."""
    parts, unset = liger_parts(model.architecture), targets.liger is None
    if targets.liger is False or engine is not Engine.AXOLOTL or (unset and task.generates):
        return frozenset()
    if parts and kind.compute_capability >= TRITON_LEAST:
        return parts
    if not unset:
        lacking = f"{kind.name} cannot run them" if parts else f"Liger has none for {model.architecture}"
        given.append(conceded("liger", True, False, lacking))
    return frozenset()


def _lora_kernels(
    task: TaskType, model: ModelFacts, targets: Targets, kind: GpuKind, given: list[Concession]
) -> bool:
    """Axolotl's, for supervised training."""
    if targets.lora_kernels is False or not task.is_supervised:
        return False
    known = model.architecture in LORA_KERNELS
    if targets.lora_kernels and not known:
        reason = f"Axolotl has none for {model.architecture}"
        given.append(conceded("lora_kernels", True, False, reason))
    return known and (targets.lora_kernels is True or kind.compute_capability > (0, 0))


def _lora_rank(targets: Targets, limits: ProfileLimits, given: list[Concession]) -> int:
    if targets.lora_r > limits.max_lora_r:
        given.append(
            conceded("lora_r", targets.lora_r, limits.max_lora_r, f"limits.max_lora_r is {limits.max_lora_r}")
        )
    return min(targets.lora_r, limits.max_lora_r)


def _rank_factors(
    profile: ResolvedProfile, model: ModelFacts, rank: int, given: list[Concession]
) -> RankFactors:
    """Relate `lora_rank_pattern` to lora_r, so that both are scaled and lowered together."""
    targets, most = profile.targets, profile.limits.max_lora_r
    if model.is_image:
        return ()
    asked = _asked_rank(profile)
    factors = {pattern: wanted / asked for pattern, wanted in targets.lora_rank_pattern.items()}
    over: dict[str, JsonValue] = {
        pattern: targets.lora_rank_pattern[pattern]
        for pattern, factor in factors.items()
        if factor * rank > most
    }
    if over:
        got: dict[str, JsonValue] = dict.fromkeys(over, most)
        given.append(conceded("lora_rank_pattern", over, got, f"limits.max_lora_r is {most}"))
    return tuple((pattern, min(factor, most / rank)) for pattern, factor in factors.items())


def _asked_rank(profile: ResolvedProfile) -> float:
    return profile.before_scale.get("lora_r", profile.targets.lora_r)
