"""Where the search begins: a wish on so many GPUs, as if memory were endless."""

from __future__ import annotations

from core.choices import Engine, Method, Optimizer, Parallelism
from core.planning.setup import Picture, Setup, loss_kind
from core.planning.wishes import Wish
from core.tasks import TaskType

#: What vLLM takes when it lives beside the training: TRL's default.
VLLM_SHARE = 0.3
#: FSDP2 shards neither bitsandbytes' states nor paged ones.
SHARDABLE: dict[Optimizer, Optimizer] = {
    Optimizer.ADAMW_BNB_8BIT: Optimizer.ADAMW_TORCH_8BIT,
    Optimizer.PAGED_ADAMW_8BIT: Optimizer.ADAMW_TORCH_8BIT,
    Optimizer.PAGED_ADAMW_32BIT: Optimizer.ADAMW_TORCH_FUSED,
    Optimizer.LION_8BIT: Optimizer.ADAMW_TORCH_8BIT,
    Optimizer.ADAFACTOR: Optimizer.ADAMW_TORCH_8BIT,
}
#: kohya encodes no more pictures at once, whatever is asked: it gains nothing.
MOST_VAE_BATCH = 8


def start(wish: Wish, world: int) -> Setup:
    """The wish on so many GPUs, as if memory were endless: what the concessions are measured against."""
    targets, task = wish.targets, wish.task.task_type
    per_gpu = wish.per_gpu(world)
    micro = largest_divisor(per_gpu, wish.micro_target)
    sharded = shards_by_wish(wish, world)
    rl = task is TaskType.GRPO
    completion = min(targets.grpo_max_completion, max(wish.length - 64, 1)) if rl else 0
    return Setup(
        task=task,
        engine=wish.engine,
        method=wish.method,
        shape=wish.shape,
        kind=wish.kind,
        world=world,
        parallelism=_parallelism(world, sharded),
        micro=micro,
        accumulation=per_gpu // micro,
        eval_micro=1,
        length=wish.length,
        completion=completion,
        rank=0 if wish.method is Method.FULL else wish.rank,
        adapter_fp32=targets.adapter_fp32,
        dropout=targets.lora_dropout > 0,
        optimizer=SHARDABLE.get(targets.optimizer, targets.optimizer) if sharded else targets.optimizer,
        fp32_master=False,
        width=wish.width,
        checkpointing=targets.gradient_checkpointing is True,
        offload=targets.activation_offload,
        attention=wish.attention,
        loss=loss_kind(wish.task, wish.engine, targets.fused_loss, targets.liger),
        reshard=targets.fsdp_reshard_after_forward,
        compile_mode=wish.compile_mode,
        fp8=wish.fp8,
        reference_ready=wish.reference_ready,
        vllm_share=VLLM_SHARE if rl and targets.grpo_vllm else 0.0,
        generations=targets.grpo_generations,
        kl=(rl and targets.grpo_beta > 0) or bool(wish.task.kl_coefficient),
        whole=0,
        ema=targets.ema_decay is not None,
        picture=_picture(wish),
    )


def _parallelism(world: int, sharded: bool) -> Parallelism:
    if world == 1:
        return Parallelism.SINGLE
    return Parallelism.FSDP if sharded else Parallelism.DDP


def can_shard(wish: Wish, world: int) -> bool:
    """Image engines have no FSDP; neither has a CPU."""
    return world > 1 and not wish.model.is_image and wish.kind.compute_capability > (0, 0)


def shards_by_wish(wish: Wish, world: int) -> bool:
    above = wish.targets.fsdp_above
    return above is not None and wish.model.params_total >= above and can_shard(wish, world)


def _picture(wish: Wish) -> Picture | None:
    if wish.model.image is None:
        return None
    targets = wish.targets
    encoders = bool(targets.text_encoder_lr) and wish.engine is Engine.KOHYA
    vae = targets.vae_batch_size
    return Picture(
        facts=wish.model.image,
        resolution=targets.resolution,
        vae_batch=min(vae, MOST_VAE_BATCH) if wish.engine is Engine.KOHYA else vae,
        text_put_away=not encoders and targets.caption_dropout == 0,
        text_adapter=encoders,
        quantized=targets.quantize_base is True,
    )


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor that is not above `most`: accumulation then keeps the batch exactly."""
    return next(one for one in range(min(number, max(most, 1)), 0, -1) if number % one == 0)


def divisors(number: int, most: int) -> list[int]:
    """Largest first."""
    return [one for one in range(min(number, most), 0, -1) if number % one == 0]
