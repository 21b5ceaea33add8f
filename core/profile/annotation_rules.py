"""The table behind `profile explain`: path, effect, when it applies, and what to say.

Facts about the engines (axolotl 0.19, sd-scripts 0.10, ai-toolkit 0.12, NCCL 2) were measured or read in
their sources. The operator's intent is kept in every case.
"""

from __future__ import annotations

from core.choices import Attention, Engine, ImageLoss, Optimizer, Schedule
from core.profile.annotations import (
    Effect,
    Rule,
    alpha_times_lr,
    is_axolotl,
    is_flux,
    is_kohya,
    is_lora,
    is_text,
)
from core.tasks import ImageModelType, TaskType

_ONE_THREAD = "the native trainer prepares batches in one thread of its own"

RULES: tuple[Rule, ...] = (
    Rule(
        "limits.gpu_memory",
        Effect.RENAMED,
        lambda t, c: is_axolotl(c),
        "kept as the planner's budget; Axolotl drops max_memory_MB, and its max_memory places layers "
        "wrongly when several GPUs train",
    ),
    Rule(
        "targets.attention",
        Effect.RENAMED,
        lambda t, c: is_axolotl(c) and t.attention is not None,
        "written as attn_implementation, and replaced by sdpa where the image lacks the kernel",
    ),
    Rule(
        "targets.attention",
        Effect.IGNORED,
        lambda t, c: is_flux(c) and t.attention is not None,
        "kohya's Flux always uses torch's sdpa",
    ),
    Rule(
        "targets.attention",
        Effect.RENAMED,
        lambda t, c: c.engine is Engine.NATIVE and t.attention in (Attention.FLASH_2, Attention.FLASH_3),
        "where the package is missing, the native trainer uses the flash kernel behind torch's sdpa",
    ),
    Rule(
        "targets.fsdp_reshard_after_forward",
        Effect.RENAMED,
        lambda t, c: is_axolotl(c),
        'the string fsdp: "full_shard auto_wrap" is refused today; written as fsdp_version 2 with '
        "reshard_after_forward and TRANSFORMER_BASED_WRAP",
    ),
    Rule(
        "targets.fsdp_forward_prefetch",
        Effect.IGNORED,
        lambda t, c: is_axolotl(c),
        "FSDP1's flag; Axolotl drops it, FSDP2 prefetches by itself",
    ),
    Rule(
        "targets.fsdp_limit_all_gathers",
        Effect.IGNORED,
        lambda t, c: is_axolotl(c),
        "FSDP1's flag; Axolotl drops it, FSDP2 bounds its gathers by itself",
    ),
    Rule(
        "targets.fsdp_backward_prefetch",
        Effect.IGNORED,
        lambda t, c: is_axolotl(c),
        "FSDP1's flag; Axolotl drops it, FSDP2 prefetches backward by itself",
    ),
    Rule(
        "targets.fsdp_above",
        Effect.DOUBTFUL,
        lambda t, c: is_text(c) and t.fsdp_above is not None and t.fsdp_above < 14_000_000_000,
        "where one card holds the model, LoRA's gradients are small and plain data parallelism is faster; "
        "unset it and FSDP comes in only where memory needs it",
    ),
    Rule(
        "targets.fsdp_above",
        Effect.IGNORED,
        lambda t, c: c.task_type is TaskType.IMAGE,
        "image engines know data parallelism only",
    ),
    Rule(
        "targets.lora_alpha",
        Effect.HARMFUL,
        lambda t, c: is_text(c) and is_lora(t) and alpha_times_lr(t) > 0.05,
        "lora_alpha × learning_rate is above 0.05; published optima lie between 0.003 and 0.03. Rank is not "
        "the problem: alpha 32 at the same rate is inside",
    ),
    Rule(
        "targets.learning_rate",
        Effect.HARMFUL,
        lambda t, c: c.is_rl and t.learning_rate > 1e-4,
        "published LoRA rates for DPO and GRPO are 1e-6 to 1e-5",
    ),
    Rule(
        "targets.lora_r",
        Effect.DOUBTFUL,
        lambda t, c: is_text(c) and t.lora_r >= 512,
        "rank 16 to 64 holds what datasets of this size can teach; 512 costs 10 to 24 GB and a fifth "
        "more compute",
    ),
    Rule(
        "targets.lora_r",
        Effect.DOUBTFUL,
        lambda t, c: not is_text(c) and t.lora_r >= 512,
        "a file of 3.4 GiB (SDXL) or 4.6 GiB (Flux) for 9 to 45 pictures, slow to upload and to evaluate",
    ),
    Rule(
        "targets.lora_dropout",
        Effect.IGNORED,
        lambda t, c: c.task_type is TaskType.DPO and t.lora_dropout > 0,
        "TRL switches dropout off for DPO",
    ),
    Rule(
        "targets.lr_cycles",
        Effect.DOUBTFUL,
        lambda t, c: t.lr_scheduler is Schedule.COSINE_WITH_RESTARTS and t.lr_cycles.high > 1,
        "each restart reheats a nearly finished model, and a stop between two lands on half the peak rate on "
        "average; cycles are planned to end with the training",
    ),
    Rule(
        "targets.num_epochs",
        Effect.DOUBTFUL,
        lambda t, c: is_text(c) and (t.num_epochs or 0) > 4,
        "held-out loss rises after a few passes over small data; the best checkpoint is submitted, not "
        "the last",
    ),
    Rule(
        "targets.num_epochs",
        Effect.RENAMED,
        lambda t, c: is_kohya(c) and t.num_epochs is not None,
        'kohya ignores the key "epoch"; epochs and max_steps are both planned as max_train_steps, whichever '
        "ends first",
    ),
    Rule(
        "targets.max_steps",
        Effect.DOUBTFUL,
        lambda t, c: (t.max_steps or 0) >= 9600,
        "a step count means nothing without its tokens: the training ends at whichever of steps, epochs "
        "and clock "
        "comes first",
    ),
    Rule(
        "targets.micro_batch_size",
        Effect.DOUBTFUL,
        lambda t, c: is_text(c) and t.micro_batch_size >= 32,
        "above 8,000 tokens per forward pass nothing gets faster; accumulation gives the same batch in "
        "less memory",
    ),
    Rule(
        "targets.micro_batch_size",
        Effect.DOUBTFUL,
        lambda t, c: is_kohya(c) and t.micro_batch_size >= 8,
        "9 to 45 pictures fill few batches of this size, and the remainder weighs as much as a full one",
    ),
    Rule(
        "targets.max_grad_norm",
        Effect.DOUBTFUL,
        lambda t, c: 0 < t.max_grad_norm < 1 and t.optimizer is not Optimizer.MUON,
        "a constant factor cancels out under Adam: it evens out spikes and does not tame a high "
        "learning rate",
    ),
    Rule(
        "targets.early_stopping_patience",
        Effect.RENAMED,
        lambda t, c: is_text(c) and t.early_stopping_patience is not None,
        "counted in evaluations, by our callback: Axolotl's own works for SFT only",
    ),
    Rule(
        "targets.early_stopping_patience",
        Effect.IGNORED,
        lambda t, c: not is_text(c) and t.early_stopping_patience is not None,
        "image engines do not evaluate",
    ),
    Rule(
        "targets.eval_steps",
        Effect.IGNORED,
        lambda t, c: not is_text(c),
        "image engines do not evaluate",
    ),
    Rule(
        "targets.save_steps",
        Effect.RENAMED,
        lambda t, c: is_text(c) and t.save_steps is not None and t.eval_steps is not None,
        "saves fall on evaluations, as the best checkpoint needs both; our callback writes every new "
        "best besides",
    ),
    Rule(
        "targets.save_steps",
        Effect.RENAMED,
        lambda t, c: is_kohya(c) and t.save_steps is not None,
        "files by step are not recognised as submissions; written as save_every_n_epochs",
    ),
    Rule(
        "targets.dataloader_num_workers",
        Effect.DOUBTFUL,
        lambda t, c: t.dataloader_num_workers >= 32 and c.engine is not Engine.NATIVE,
        "per GPU, so four cards start four times as many processes of half a gigabyte; limited to the "
        "host's cores",
    ),
    Rule(
        "targets.dataloader_num_workers",
        Effect.IGNORED,
        lambda t, c: c.engine is Engine.NATIVE and t.dataloader_num_workers > 0,
        _ONE_THREAD,
    ),
    Rule(
        "targets.dataloader_persistent_workers",
        Effect.IGNORED,
        lambda t, c: c.engine is Engine.NATIVE and t.dataloader_persistent_workers,
        _ONE_THREAD,
    ),
    Rule(
        "targets.dataloader_drop_last",
        Effect.IGNORED,
        lambda t, c: c.engine is Engine.NATIVE and t.dataloader_drop_last,
        "the native trainer does not read it",
    ),
    Rule(
        "targets.dataloader_persistent_workers",
        Effect.OURS,
        lambda t, c: is_axolotl(c) and t.dataloader_persistent_workers,
        "Axolotl drops the key; our plugin sets it",
    ),
    Rule(
        "targets.dataloader_drop_last",
        Effect.OURS,
        lambda t, c: is_axolotl(c) and c.is_rl and t.dataloader_drop_last,
        "Axolotl ignores it for DPO and GRPO; our plugin sets it",
    ),
    Rule(
        "targets.group_by_length",
        Effect.IGNORED,
        lambda t, c: is_text(c) and t.group_by_length and (c.is_rl or t.sample_packing is not False),
        "nothing to group where rows are packed, and Axolotl ignores it for DPO and GRPO",
    ),
    Rule(
        "targets.group_by_length",
        Effect.IGNORED,
        lambda t, c: not is_text(c) and t.group_by_length,
        "pictures are bucketed by size instead",
    ),
    Rule(
        "targets.ema_decay",
        Effect.OURS,
        lambda t, c: is_text(c) and t.ema_decay is not None,
        "no text engine has it; our callback averages, and evaluates and submits the average",
    ),
    Rule(
        "targets.ema_decay",
        Effect.IGNORED,
        lambda t, c: is_kohya(c) and t.ema_decay is not None,
        "kohya's LoRA training has no EMA and drops any such key",
    ),
    Rule(
        "targets.ema_decay",
        Effect.RENAMED,
        lambda t, c: c.engine is Engine.AI_TOOLKIT and t.ema_decay is not None,
        "written as ema_config; updated every step whatever ema_every says",
    ),
    Rule(
        "targets.plateau_factor",
        Effect.OURS,
        lambda t, c: is_text(c) and t.plateau_factor is not None,
        "our callback applies it at evaluations, on top of the schedule",
    ),
    Rule(
        "targets.lr_stages",
        Effect.OURS,
        lambda t, c: is_text(c) and bool(t.lr_stages),
        "no engine has stages; our callback switches the rate at the planned steps",
    ),
    Rule(
        "targets.learning_rate",
        Effect.HARMFUL,
        lambda t, c: not 1e-7 <= t.learning_rate <= 0.01 and t.optimizer is not Optimizer.PRODIGY,
        "no training learns at such a rate: full fine-tunes take 1e-6 to 1e-4, adapters 1e-5 to 1e-3; is the "
        "exponent as meant?",
    ),
    Rule(
        "targets.compile_mode",
        Effect.DOUBTFUL,
        lambda t, c: is_text(c) and t.compile_mode is not None,
        "5 to 15 minutes before the first step for 15 to 25% afterwards: left out where the run is too short "
        "to win them back",
    ),
    Rule(
        "targets.fp8",
        Effect.DOUBTFUL,
        lambda t, c: is_text(c) and t.fp8,
        "1.1 to 1.3 times bf16 at 1B to 8B, not 2; slower than bf16 without compilation or with gradient "
        "checkpointing, and only for supervised training",
    ),
    Rule(
        "targets.fp8",
        Effect.IGNORED,
        lambda t, c: c.engine is Engine.NATIVE and t.fp8 and is_lora(t),
        "off for an adapter: the frozen weights of a LoRA run gain nothing from fp8 products",
    ),
    Rule(
        "targets.optimizer",
        Effect.RENAMED,
        lambda t, c: is_text(c) and t.optimizer in (Optimizer.ADAMW_BNB_8BIT, Optimizer.PAGED_ADAMW_8BIT),
        "under FSDP2 it is refused; adamw_torch_8bit takes its place there",
    ),
    Rule(
        "targets.fp16",
        Effect.IGNORED,
        lambda t, c: t.fp16 and t.bf16,
        "bf16 wins when both are set",
    ),
    Rule(
        "targets.vae_batch_size",
        Effect.HARMFUL,
        lambda t, c: is_kohya(c) and t.vae_batch_size > 16,
        "32 pictures of 1024² need some 83 GB in the fp32 VAE of SDXL, for a cache that takes seconds; "
        "limited "
        "to what fits and to the number of pictures",
    ),
    Rule(
        "targets.min_snr_gamma",
        Effect.IGNORED,
        lambda t, c: is_flux(c) and t.min_snr_gamma is not None,
        "no effect at all on Flux: results are identical bit by bit",
    ),
    Rule(
        "targets.min_snr_gamma",
        Effect.DOUBTFUL,
        lambda t, c: c.image_type is ImageModelType.SDXL and (t.min_snr_gamma or 0) >= 10,
        "nearly off: at 24 it touches 42 of 1000 timesteps, the paper's 5 touches 147",
    ),
    Rule(
        "targets.huber_c",
        Effect.IGNORED,
        lambda t, c: is_kohya(c) and t.huber_c is not None and t.image_loss in (ImageLoss.L1, ImageLoss.L2),
        "used with a huber loss only (image_loss); validators score squared error",
    ),
    Rule(
        "targets.image_loss",
        Effect.RENAMED,
        lambda t, c: is_flux(c) and t.image_loss in (ImageLoss.HUBER, ImageLoss.SMOOTH_L1),
        'kohya\'s default huber schedule "snr" crashes on Flux; "exponential" is written',
    ),
    Rule(
        "targets.text_encoder_lr",
        Effect.IGNORED,
        lambda t, c: is_flux(c) and bool(t.text_encoder_lr),
        "the validators load the model part of a Flux LoRA only; training the encoders makes it lean on what "
        "is thrown away",
    ),
    Rule(
        "targets.warmup_steps",
        Effect.RENAMED,
        lambda t, c: is_kohya(c) and bool(t.warmup_steps),
        "multiplied by the GPUs: kohya's scheduler runs that many times per step; left out where the "
        "schedule "
        "is constant, which refuses it",
    ),
    Rule(
        "targets.lr_scheduler",
        Effect.IGNORED,
        lambda t, c: c.engine is Engine.AI_TOOLKIT and t.lr_scheduler is not Schedule.CONSTANT,
        "written, but ai-toolkit's templates train at a constant rate",
    ),
    Rule(
        "targets.gradient_checkpointing",
        Effect.DOUBTFUL,
        lambda t, c: is_text(c) and t.gradient_checkpointing is False and t.micro_batch_size >= 16,
        "an 8B model without it holds some 8,000 tokens per pass on 80 GB; the micro batch shrinks before "
        "this is given up",
    ),
    Rule(
        "container.cpus",
        Effect.RENAMED,
        lambda t, c: True,
        "cut to the cores that the host has: docker refuses to start otherwise",
    ),
    Rule(
        "env.NCCL_NTHREADS",
        Effect.IGNORED,
        lambda t, c: True,
        "NCCL takes 64, 128, 256 or 512 and warns at anything else",
    ),
    Rule(
        "env.NCCL_NET_GDR_LEVEL",
        Effect.IGNORED,
        lambda t, c: True,
        "between hosts only; inside one, NVLink carries the traffic",
    ),
    Rule(
        "env.CUDA_LAUNCH_BLOCKING",
        Effect.IGNORED,
        lambda t, c: True,
        "0 is CUDA's default",
    ),
)
