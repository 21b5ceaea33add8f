"""What today's engines make of a profile value: renamed, ignored, done by us, doubtful or harmful.

`EFFECT_RULES` is the table behind `profile explain`. Facts about the engines (axolotl 0.19, sd-scripts
0.10, ai-toolkit 0.12, NCCL 2) were measured or read in their sources. The operator's intent is kept in
every case.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from core.domain.choices import Attention, Engine, ImageLoss, LrSchedule, Method, Optimizer
from core.domain.tasks import ImageModelType, TaskType
from core.profile.targets import Targets


class EngineEffect(StrEnum):
    RENAMED = "renamed"  # the engine has the idea under another name or in another form
    OURS = "done by us"  # no engine has it; our trainer's callbacks do it
    IGNORED = "no effect"  # accepted and without consequence
    DOUBTFUL = "doubtful"  # works, and the evidence speaks against it
    HARMFUL = "harmful"  # breaks the run or the result as it stands


class EngineCase(NamedTuple):
    """The task and the engine that an annotation is for."""

    task_type: TaskType
    image_type: ImageModelType | None
    engine: Engine

    @property
    def is_text(self) -> bool:
        return self.task_type.is_text

    @property
    def is_rl(self) -> bool:
        return self.task_type.is_rl

    @property
    def is_kohya_flux(self) -> bool:
        return self.engine is Engine.KOHYA and self.image_type is ImageModelType.FLUX


class EffectAnnotation(NamedTuple):
    path: str
    effect: EngineEffect
    text: str


Condition = Callable[[Targets, EngineCase], bool]


class EffectRule(NamedTuple):
    path: str
    effect: EngineEffect
    applies: Condition
    text: str


def is_lora(targets: Targets) -> bool:
    return targets.method is not Method.FULL


def alpha_times_lr(targets: Targets) -> float:
    """With Adam and alpha/r scaling the first updates go as this product, whatever the rank."""
    return (targets.lora_alpha or 32.0) * targets.learning_rate


_ONE_THREAD = "the native trainer prepares batches in one thread of its own"


def _rule_of(effect: EngineEffect) -> Callable[[str, Condition, str], EffectRule]:
    return lambda path, applies, text: EffectRule(path, effect, applies, text)


_renamed, _ours = _rule_of(EngineEffect.RENAMED), _rule_of(EngineEffect.OURS)
_ignored, _doubtful = _rule_of(EngineEffect.IGNORED), _rule_of(EngineEffect.DOUBTFUL)
_harmful = _rule_of(EngineEffect.HARMFUL)


def _always(_targets: Targets, _case: EngineCase) -> bool:
    return True


def _on_images(_targets: Targets, case: EngineCase) -> bool:
    return not case.is_text


def _with_axolotl(_targets: Targets, case: EngineCase) -> bool:
    return case.engine is Engine.AXOLOTL


EFFECT_RULES: tuple[EffectRule, ...] = (
    _renamed(
        "limits.gpu_memory",
        _with_axolotl,
        "kept as the planner's budget; Axolotl drops max_memory_MB, and its max_memory places layers "
        "wrongly when several GPUs train",
    ),
    _renamed(
        "targets.attention",
        lambda t, c: c.engine is Engine.AXOLOTL and t.attention is not None,
        "written as attn_implementation, and replaced by sdpa where the image lacks the kernel",
    ),
    _ignored(
        "targets.attention",
        lambda t, c: c.is_kohya_flux and t.attention is not None,
        "kohya's Flux always uses torch's sdpa",
    ),
    _renamed(
        "targets.attention",
        lambda t, c: c.engine is Engine.NATIVE and t.attention in (Attention.FLASH_2, Attention.FLASH_3),
        "where the package is missing, the native trainer uses the flash kernel behind torch's sdpa",
    ),
    _renamed(
        "targets.fsdp_reshard_after_forward",
        _with_axolotl,
        'the string fsdp: "full_shard auto_wrap" is refused today; written as fsdp_version 2 with '
        "reshard_after_forward and TRANSFORMER_BASED_WRAP",
    ),
    _ignored(
        "targets.fsdp_forward_prefetch",
        _with_axolotl,
        "FSDP1's flag; Axolotl drops it, FSDP2 prefetches by itself",
    ),
    _ignored(
        "targets.fsdp_limit_all_gathers",
        _with_axolotl,
        "FSDP1's flag; Axolotl drops it, FSDP2 bounds its gathers by itself",
    ),
    _ignored(
        "targets.fsdp_backward_prefetch",
        _with_axolotl,
        "FSDP1's flag; Axolotl drops it, FSDP2 prefetches backward by itself",
    ),
    _doubtful(
        "targets.fsdp_above",
        lambda t, c: c.is_text and t.fsdp_above is not None and t.fsdp_above < 14_000_000_000,
        "where one GPU holds the model, LoRA's gradients are small and plain data parallelism is faster; "
        "unset it and FSDP comes in only where memory needs it",
    ),
    _ignored("targets.fsdp_above", _on_images, "image engines know data parallelism only"),
    _harmful(
        "targets.lora_alpha",
        lambda t, c: c.is_text and is_lora(t) and alpha_times_lr(t) > 0.05,
        "lora_alpha × learning_rate is above 0.05; published optima lie between 0.003 and 0.03. Rank is not "
        "the problem: alpha 32 at the same rate is inside",
    ),
    _harmful(
        "targets.learning_rate",
        lambda t, c: c.is_rl and t.learning_rate > 1e-4,
        "published LoRA rates for DPO and GRPO are 1e-6 to 1e-5",
    ),
    _ignored(
        "targets.lora_rank_pattern",
        lambda t, c: not c.is_text and bool(t.lora_rank_pattern),
        "image engines know no patterns; what sd-scripts has instead (block_dims, for Flux img_attn_dim and "
        "others) can be written as engine_config.kohya.network_args",
    ),
    _doubtful(
        "targets.lora_r",
        lambda t, c: c.is_text and t.lora_r >= 512,
        "rank 16 to 64 holds what datasets of this size can teach; 512 costs 10 to 24 GB and a fifth more "
        "compute",
    ),
    _doubtful(
        "targets.lora_r",
        lambda t, c: not c.is_text and t.lora_r >= 512,
        "a file of 3.4 GiB (SDXL) or 4.6 GiB (Flux) for 9 to 45 pictures, slow to upload and to evaluate",
    ),
    _ignored(
        "targets.lora_dropout",
        lambda t, c: c.task_type.has_pairs and t.lora_dropout > 0,
        "TRL switches dropout off for DPO",
    ),
    _doubtful(
        "targets.lr_cycles",
        lambda t, c: t.lr_scheduler is LrSchedule.COSINE_WITH_RESTARTS and t.lr_cycles.high > 1,
        "each restart reheats a nearly finished model, and a stop between two lands on half the peak rate "
        "on average; cycles are planned to end with the training",
    ),
    _doubtful(
        "targets.num_epochs",
        lambda t, c: c.is_text and (t.num_epochs or 0) > 4,
        "held-out loss rises after a few passes over small data; the best checkpoint is submitted, not the "
        "last",
    ),
    _renamed(
        "targets.num_epochs",
        lambda t, c: c.engine is Engine.KOHYA and t.num_epochs is not None,
        'kohya ignores the key "epoch"; epochs and max_steps are both planned as max_train_steps, whichever '
        "ends first",
    ),
    _doubtful(
        "targets.max_steps",
        lambda t, c: (t.max_steps or 0) >= 9600,
        "a step count means nothing without its tokens: the training ends at whichever of steps, epochs and "
        "clock comes first",
    ),
    _doubtful(
        "targets.micro_batch_size",
        lambda t, c: c.is_text and t.micro_batch_size >= 32,
        "above 8,000 tokens per forward pass nothing gets faster; accumulation gives the same batch in less "
        "memory",
    ),
    _doubtful(
        "targets.micro_batch_size",
        lambda t, c: c.engine is Engine.KOHYA and t.micro_batch_size >= 8,
        "9 to 45 pictures fill few batches of this size, and the remainder weighs as much as a full one",
    ),
    _doubtful(
        "targets.max_grad_norm",
        lambda t, c: 0 < t.max_grad_norm < 1 and t.optimizer is not Optimizer.MUON,
        "a constant factor cancels out under Adam: it evens out spikes and does not tame a high learning "
        "rate",
    ),
    _renamed(
        "targets.early_stopping_patience",
        lambda t, c: c.is_text and t.early_stopping_patience is not None,
        "counted in evaluations, by our callback: Axolotl's own works for SFT only",
    ),
    _ignored(
        "targets.early_stopping_patience",
        lambda t, c: not c.is_text and t.early_stopping_patience is not None,
        "image engines do not evaluate",
    ),
    _ignored("targets.eval_steps", _on_images, "image engines do not evaluate"),
    _renamed(
        "targets.save_steps",
        lambda t, c: c.is_text and t.save_steps is not None and t.eval_steps is not None,
        "saves fall on evaluations, as the best checkpoint needs both; our callback writes every new best "
        "besides",
    ),
    _renamed(
        "targets.save_steps",
        lambda t, c: c.engine is Engine.KOHYA and t.save_steps is not None,
        "files by step are not recognised as submissions; written as save_every_n_epochs",
    ),
    _doubtful(
        "targets.dataloader_num_workers",
        lambda t, c: t.dataloader_num_workers >= 32 and c.engine is not Engine.NATIVE,
        "per GPU, so four GPUs start four times as many processes of half a gigabyte; limited to the "
        "host's cores",
    ),
    _ignored(
        "targets.dataloader_num_workers",
        lambda t, c: c.engine is Engine.NATIVE and t.dataloader_num_workers > 0,
        _ONE_THREAD,
    ),
    _ignored(
        "targets.dataloader_persistent_workers",
        lambda t, c: c.engine is Engine.NATIVE and t.dataloader_persistent_workers,
        _ONE_THREAD,
    ),
    _ignored(
        "targets.dataloader_drop_last",
        lambda t, c: c.engine is Engine.NATIVE and t.dataloader_drop_last,
        "the native trainer does not read it",
    ),
    _ours(
        "targets.dataloader_persistent_workers",
        lambda t, c: c.engine is Engine.AXOLOTL and t.dataloader_persistent_workers,
        "Axolotl drops the key; our plugin sets it",
    ),
    _ours(
        "targets.dataloader_drop_last",
        lambda t, c: c.engine is Engine.AXOLOTL and c.is_rl and t.dataloader_drop_last,
        "Axolotl ignores it for DPO and GRPO; our plugin sets it",
    ),
    _ignored(
        "targets.group_by_length",
        lambda t, c: c.is_text and t.group_by_length and (c.is_rl or t.sample_packing is not False),
        "nothing to group where rows are packed, and Axolotl ignores it for DPO and GRPO",
    ),
    _ignored(
        "targets.group_by_length",
        lambda t, c: not c.is_text and t.group_by_length,
        "pictures are bucketed by size instead",
    ),
    _ours(
        "targets.ema_decay",
        lambda t, c: c.is_text and t.ema_decay is not None,
        "no text engine has it; our callback averages, and evaluates and submits the average",
    ),
    _ignored(
        "targets.ema_decay",
        lambda t, c: c.engine is Engine.KOHYA and t.ema_decay is not None,
        "kohya's LoRA training has no EMA and drops any such key",
    ),
    _renamed(
        "targets.ema_decay",
        lambda t, c: c.engine is Engine.AI_TOOLKIT and t.ema_decay is not None,
        "written as ema_config; updated every step whatever ema_every says",
    ),
    _ours(
        "targets.plateau_factor",
        lambda t, c: c.is_text and t.plateau_factor is not None,
        "our callback applies it at evaluations, on top of the schedule",
    ),
    _ours(
        "targets.lr_stages",
        lambda t, c: c.is_text and bool(t.lr_stages),
        "no engine has stages; our callback switches the rate at the planned steps",
    ),
    _harmful(
        "targets.learning_rate",
        lambda t, c: not 1e-7 <= t.learning_rate <= 0.01 and t.optimizer is not Optimizer.PRODIGY,
        "no training learns at such a rate: full fine-tunes take 1e-6 to 1e-4, adapters 1e-5 to 1e-3; is "
        "the exponent as meant?",
    ),
    _doubtful(
        "targets.compile_mode",
        lambda t, c: c.is_text and t.compile_mode is not None,
        "5 to 15 minutes before the first step for 15 to 25% afterwards: the plan leaves it out where the "
        "steps are too few to win them back, and says so",
    ),
    _doubtful(
        "targets.fp8",
        lambda t, c: c.is_text and t.fp8,
        "1.1 to 1.3 times bf16 at 1B to 8B, not 2; slower than bf16 without compilation or with gradient "
        "checkpointing, and only for supervised training",
    ),
    _ignored(
        "targets.fp8",
        lambda t, c: c.engine is Engine.NATIVE and t.fp8 and is_lora(t),
        "off for an adapter: the frozen weights of a LoRA run gain nothing from fp8 products",
    ),
    _renamed(
        "targets.optimizer",
        lambda t, c: c.is_text and t.optimizer in (Optimizer.ADAMW_BNB_8BIT, Optimizer.PAGED_ADAMW_8BIT),
        "under FSDP2 it is refused; adamw_torch_8bit takes its place there",
    ),
    _ignored(
        "targets.liger", lambda t, c: t.liger is True and c.engine is not Engine.AXOLOTL, "Axolotl's alone"
    ),
    _ignored("targets.fp16", lambda t, c: t.fp16 and t.bf16, "bf16 wins when both are set"),
    _harmful(
        "targets.vae_batch_size",
        lambda t, c: c.engine is Engine.KOHYA and t.vae_batch_size > 16,
        "32 pictures of 1024² need some 83 GB in the fp32 VAE of SDXL, for a cache that takes seconds; "
        "limited to what fits and to the number of pictures",
    ),
    _ignored(
        "targets.min_snr_gamma",
        lambda t, c: c.is_kohya_flux and t.min_snr_gamma is not None,
        "no effect at all on Flux: results are identical bit by bit",
    ),
    _doubtful(
        "targets.min_snr_gamma",
        lambda t, c: c.image_type is ImageModelType.SDXL and (t.min_snr_gamma or 0) >= 10,
        "nearly off: at 24 it touches 42 of 1000 timesteps, the paper's 5 touches 147",
    ),
    _ignored(
        "targets.huber_c",
        lambda t, c: (
            c.engine is Engine.KOHYA
            and t.huber_c is not None
            and t.image_loss in (ImageLoss.L1, ImageLoss.L2)
        ),
        "used with a huber loss only (image_loss); validators score squared error",
    ),
    _renamed(
        "targets.image_loss",
        lambda t, c: c.is_kohya_flux and t.image_loss in (ImageLoss.HUBER, ImageLoss.SMOOTH_L1),
        'kohya\'s default huber schedule "snr" crashes on Flux; "exponential" is written',
    ),
    _ignored(
        "targets.text_encoder_lr",
        lambda t, c: c.is_kohya_flux and bool(t.text_encoder_lr),
        "the validators load the model part of a Flux LoRA only; training the encoders makes it lean on "
        "what is thrown away",
    ),
    _renamed(
        "targets.warmup_steps",
        lambda t, c: c.engine is Engine.KOHYA and bool(t.warmup_steps),
        "multiplied by the GPUs: kohya's scheduler runs that many times per step; left out where the "
        "schedule is constant, which refuses it",
    ),
    _ignored(
        "targets.checkpoint_choice",
        lambda t, c: c.image_type is ImageModelType.SDXL and t.checkpoint_choice is not None,
        "files of SDXL cannot be scored: validators draw none any more; the last one is submitted",
    ),
    _ignored(
        "targets.conv_rank",
        lambda t, c: c.engine is Engine.AI_TOOLKIT and t.conv_rank is not None,
        "the transformers of these models have no convolutions",
    ),
    _doubtful(
        "targets.gradient_checkpointing",
        lambda t, c: c.is_text and t.gradient_checkpointing is False and t.micro_batch_size >= 16,
        "an 8B model without it holds some 8,000 tokens per pass on 80 GB; the micro batch shrinks before "
        "this is given up",
    ),
    _renamed(
        "container.cpus",
        _always,
        "the cores of this range that the host has are divided among its GPUs, if there are enough; "
        "a cluster binds its tasks itself",
    ),
    _ignored("env.NCCL_NTHREADS", _always, "NCCL takes 64, 128, 256 or 512 and warns at anything else"),
    _ignored("env.NCCL_NET_GDR_LEVEL", _always, "between hosts only; inside one, NVLink carries the traffic"),
    _doubtful(
        "env.NCCL_BUFFSIZE",
        _always,
        "per connection and channel, 4 MiB by default: a larger one helps networks, not NVLink, and takes "
        "memory on several GPUs",
    ),
    _doubtful(
        "env.TORCH_NCCL_ASYNC_ERROR_HANDLING",
        _always,
        "with PyTorch's default, 3, the other ranks end at once when one fails; 1 first aborts NCCL's "
        "communicators, which can itself hang",
    ),
    _ignored("env.CUDA_LAUNCH_BLOCKING", _always, "0 is CUDA's default"),
)
