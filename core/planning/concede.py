"""What a plan had to give up, each with the number that forced it."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import JsonValue

from core.budget import Concession
from core.choices import CompileMode, Engine, GpuStrategy, Parallelism
from core.planning.fit import Fit, Timed
from core.planning.ladder import BUSY_TOKENS, with_micro
from core.planning.memory import memory_of, peak_bytes
from core.planning.setup import Setup, vary
from core.planning.start import MOST_VAE_BATCH, shards_by_wish
from core.planning.wishes import Wish
from core.shapes import EXPERT, linear_shapes
from core.tasks import TaskType
from core.units import show_bytes, show_params, show_seconds


def concessions(wish: Wish, fit: Fit, budget: int) -> Iterator[Concession]:
    """In the order in which a reader asks: machinery, method, batch, lengths, time."""
    timed = fit.best
    yield from wish.concessions
    yield from _gpus(wish, fit)
    yield from _sharding(wish, timed, budget)
    yield from _quality(wish, timed, budget)
    yield from _batch(wish, timed, budget)
    yield from _levers(wish, timed)
    yield from _pictures(wish, timed, budget)
    yield from _time(wish, timed)


#: The terms that a step back lessens: what its reason is to name.
PASSES = ("activations", "logits", "layer at work")
STATES = ("weights", "optimizer", "gradients", "ddp buckets")
TRAINED = ("optimizer", "adapter", "gradients", "ddp buckets", "optimizer work", "adapter in bf16")


def over(setup: Setup, budget: int, about: tuple[str, ...] = PASSES) -> str:
    """The number that forced a step: what it is about, the total, the budget."""
    found = memory_of(setup, budget)
    named = [term for term in found.terms if term.name in about] or list(found.terms)
    largest = max(named, key=lambda term: term.bytes)
    return (
        f"{show_bytes(largest.bytes)} of {largest.name}, {show_bytes(found.total_bytes)} in all, "
        f"over the {show_bytes(budget)} budget"
    )


def _gave(field: str, wanted: JsonValue, got: JsonValue, reason: str) -> Concession:
    return Concession(field=field, wanted=wanted, got=got, reason=reason)


def _gpus(wish: Wish, fit: Fit) -> Iterator[Concession]:
    got, wished = fit.best.setup.world, fit.choice.wished
    if got == wished or wish.targets.gpu_strategy is GpuStrategy.AUTO:
        return
    if wish.engine is Engine.AI_TOOLKIT:
        reason = fit.choice.why
    elif got < wished:
        reason = f"{fit.choice.why}; {got} can be had"
    else:
        reason = f"{fit.choice.why}; fewer do not fit in memory or time"
    yield _gave("gpus", wished, got, reason)


def _sharding(wish: Wish, timed: Timed, budget: int) -> Iterator[Concession]:
    setup = timed.setup
    by_wish, sharded = shards_by_wish(wish, setup.world), setup.parallelism is Parallelism.FSDP
    above = wish.targets.fsdp_above
    if by_wish and not sharded:
        gathered = setup.completion * setup.shape.params * 2
        reason = f"generation would gather {show_bytes(gathered)} per step; the model fits one GPU"
        yield _gave("fsdp_above", above, None, reason)
    elif sharded and not by_wish and above is not None:
        alone = vary(setup, parallelism=Parallelism.DDP)
        yield _gave("fsdp_above", above, wish.model.params_total, f"unsharded {over(alone, budget, STATES)}")
    elif above is not None and setup.world == 1 and wish.model.params_total >= above:
        yield _gave("fsdp_above", above, None, "there is nothing to shard over on one GPU")


def _quality(wish: Wish, timed: Timed, budget: int) -> Iterator[Concession]:
    wished, setup = timed.wished, timed.setup
    if setup.method is not wished.method:
        yield _gave("method", wished.method.value, setup.method.value, over(_least(wished), budget, STATES))
    if setup.optimizer is not wish.targets.optimizer:
        yield _gave(
            "optimizer", wish.targets.optimizer.value, setup.optimizer.value, _optimizer(wish, timed, budget)
        )
    if wish.targets.fp32_master and setup.full and not setup.fp32_master:
        native = setup.engine is Engine.NATIVE
        why = (
            over(vary(setup, fp32_master=True), budget) if native else "Axolotl trains bf16 weights in place"
        )
        yield _gave("fp32_master", True, False, why)
    if setup.length < wished.length:
        longer = vary(setup, length=wished.length)
        share = f"; {timed.seq.dropped_share:.1%} of the rows are longer" if timed.seq.dropped_share else ""
        yield _gave("sequence_len", wished.length, setup.length, over(longer, budget) + share)
    if not setup.full and setup.rank < wish.rank:
        higher = vary(setup, rank=wish.rank)
        yield _gave("lora_r", wish.rank, setup.rank, over(higher, budget, TRAINED))
    if not setup.full:
        yield from _experts(wish)


def _experts(wish: Wish) -> Iterator[Concession]:
    """transformers 5 keeps a layer's experts in single tensors. peft could adapt these as parameters, but the
    evaluation of offers has them apart and would load such an adapter as none."""
    asked = wish.targets.lora_target_modules
    shapes = linear_shapes(wish.model)
    missed = [
        one
        for one in shapes
        if one.name.startswith(EXPERT) and (not asked or one.name.removeprefix(EXPERT) in asked)
    ]
    if not missed:
        return
    carrying = [one.name for one in shapes if not one.routed and (not asked or one.name in asked)]
    experts, total = show_params(sum(one.params for one in missed)), show_params(wish.model.params_total)
    reason = f"{experts} of {total} are experts in single tensors, out of LoRA's reach"
    wanted = ", ".join(asked) if asked else "every linear layer"
    yield _gave("lora_target_modules", wanted, ", ".join(carrying) or "none", reason)


def _least(setup: Setup) -> Setup:
    return vary(with_micro(setup, 1), checkpointing=True)


def _optimizer(wish: Wish, timed: Timed, budget: int) -> str:
    setup, asked = timed.setup, wish.targets.optimizer
    if setup.optimizer is timed.wished.optimizer or (setup.sharded and asked is not timed.wished.optimizer):
        return "FSDP2 cannot shard its states"
    return over(vary(setup, optimizer=asked), budget, ("optimizer",))


def _batch(wish: Wish, timed: Timed, budget: int) -> Iterator[Concession]:
    setup, targets = timed.setup, wish.targets
    asked, got = wish.effective(setup.world), setup.micro * setup.accumulation * setup.world
    per_gpu = setup.micro * setup.accumulation
    if got != asked:
        yield _gave("effective_batch_size", asked, got, _effective(wish, timed))
    wanted = min(wish.micro_target, per_gpu)
    if wish.limits.max_micro_batch < targets.micro_batch_size:
        reason = f"limits.max_micro_batch is {wish.limits.max_micro_batch}"
        yield _gave("micro_batch_size", targets.micro_batch_size, wish.limits.max_micro_batch, reason)
    if setup.micro < timed.wished.micro:
        yield _gave("micro_batch_size", wanted, setup.micro, _micro(wish, timed, budget))
        steps = targets.gradient_accumulation_steps
        if setup.accumulation != steps and targets.effective_batch_size is None:
            reason = f"keeps {got} sequences per step over {setup.world} GPUs"
            yield _gave("gradient_accumulation_steps", steps, setup.accumulation, reason)
    if setup.checkpointing and targets.gradient_checkpointing is False:
        yield _gave("gradient_checkpointing", False, True, _uncheckpointed(timed, budget))


def _effective(wish: Wish, timed: Timed) -> str:
    setup = timed.setup
    if setup.task is not TaskType.GRPO:
        return f"a whole number of sequences on each of {setup.world} GPUs"
    group = setup.generations
    if setup.micro * setup.accumulation < timed.wished.micro * timed.wished.accumulation:
        return "the completions of a step are generated together and did not fit in memory"
    return f"Axolotl wants groups of {group} completions, and {group} × {setup.world} on each GPU"


def _micro(wish: Wish, timed: Timed, budget: int) -> str:
    """Either it does not fit, or it had to be checkpointed and more would gain nothing."""
    larger = with_micro(timed.setup, timed.wished.micro)
    if peak_bytes(larger) > budget:
        return over(larger, budget)
    plain = vary(larger, checkpointing=False)
    tokens = timed.setup.micro * timed.setup.length
    return f"{over(plain, budget)}; with checkpointing {max(tokens, BUSY_TOKENS):,} tokens keep the GPU busy"


def _uncheckpointed(timed: Timed, budget: int) -> str:
    plain = vary(timed.setup, checkpointing=False)
    return over(plain if peak_bytes(plain) > budget else with_micro(plain, timed.wished.micro), budget)


def no_fp8(setup: Setup) -> str | None:
    """Why the native trainer computes in bf16 although fp8 is asked for (`trainer/native/speed.py`)."""
    if setup.engine is not Engine.NATIVE:
        return None
    if not setup.full:
        return "the frozen weights of a LoRA run gain nothing from fp8 products"
    if setup.compile_mode is None:
        return "without compilation its scaling makes steps several times slower"
    return None


def _levers(wish: Wish, timed: Timed) -> Iterator[Concession]:
    """What the engine leaves off, or replaces, whatever the memory."""
    setup, targets = timed.setup, wish.targets
    if setup.fp8 and (why := no_fp8(setup)) is not None:
        yield _gave("fp8", True, False, why)
    static, mode = timed.seq.packing and not setup.checkpointing, setup.compile_mode
    if setup.engine is Engine.NATIVE and not static and mode is not None and mode is not CompileMode.DEFAULT:
        why = "CUDA graphs replay fixed shapes; rows of many lengths and checkpointing have none"
        yield _gave("compile_mode", mode.value, "max-autotune-no-cudagraphs", why)
    if setup.ema and not setup.averages:
        sharded = "the model is sharded, and its weights lie on several GPUs"
        why = "sd-scripts has no moving average" if setup.engine is Engine.KOHYA else sharded
        yield _gave("ema_decay", targets.ema_decay, None, why)


def _pictures(wish: Wish, timed: Timed, budget: int) -> Iterator[Concession]:
    before, after = timed.wished.picture, timed.setup.picture
    if before is None or after is None:
        return
    reason, asked = over(timed.wished, budget), wish.targets.vae_batch_size
    if after.vae_batch < asked:
        most = f"{MOST_VAE_BATCH} encode as fast: it is for the latents' cache alone, which takes seconds"
        yield _gave(
            "vae_batch_size", asked, after.vae_batch, reason if after.vae_batch < before.vae_batch else most
        )
    if after.quantized and not before.quantized:
        yield _gave("quantize_base", None, True, reason)
    if before.text_adapter and not after.text_adapter:
        yield _gave("text_encoder_lr", "trained", None, reason)
    if after.resolution < before.resolution:
        yield _gave("resolution", before.resolution, after.resolution, reason)


def epochs_between_files(timed: Timed) -> int:
    return max(timed.schedule.save_every // max(timed.schedule.per_epoch, 1), 1)


def _time(wish: Wish, timed: Timed) -> Iterator[Concession]:
    schedule, targets = timed.schedule, wish.targets
    if not schedule.complete:
        field = "num_epochs" if targets.max_steps is None or targets.num_epochs is not None else "max_steps"
        wanted: JsonValue = round(schedule.wanted_epochs, 2) if field == "num_epochs" else schedule.wanted
        got: JsonValue = round(schedule.epochs, 2) if field == "num_epochs" else schedule.total
        needs = schedule.wanted * timed.rate.step_s
        reason = (
            f"{schedule.wanted:,} steps of {timed.rate.step_s:.3g} s are {show_seconds(needs)}; "
            f"{show_seconds(schedule.train_s)} are left for training"
        )
        yield _gave(field, wanted, got, reason)
    if (
        schedule.eval_rows
        and targets.eval_steps
        and schedule.eval_every > targets.eval_steps
        and schedule.total > targets.eval_steps
    ):
        share = f"limits.eval_share is {wish.limits.eval_share:.0%}"
        reason = f"an evaluation takes {show_seconds(timed.rate.eval_s)}; {share}"
        yield _gave("eval_steps", targets.eval_steps, schedule.eval_every, reason)
    if (
        targets.save_steps
        and schedule.save_every > targets.save_steps
        and schedule.total > targets.save_steps
    ):
        yield _gave("save_steps", targets.save_steps, schedule.save_every, "checkpoints fall on evaluations")
    between = targets.save_every_epochs
    if between and timed.setup.engine is Engine.KOHYA and epochs_between_files(timed) < between:
        reason = f"{schedule.epochs:.3g} epochs in all, of which some are to leave a file"
        yield _gave("save_every_epochs", between, epochs_between_files(timed), reason)
    if schedule.keep < schedule.wanted_keep:
        yield _gave("save_total_limit", schedule.wanted_keep, schedule.keep, "the disk holds no more of them")
