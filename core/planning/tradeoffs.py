"""Why the plan has its numbers.

The concessions, each with the number that forced it; and one reason per number: the profile's line, or what
decided it.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import JsonValue

from core.domain.choices import Attention, CompileMode, Engine, GpuStrategy, Parallelism
from core.domain.units import show_bytes, show_params, show_seconds
from core.models.shapes import EXPERT_PREFIX, linear_shapes
from core.planning.budget import Concession, conceded
from core.planning.candidate import RunCandidate, is_adapted, vary
from core.planning.memory.peak import memory_of, peak_bytes
from core.planning.optimizer import guarded_rate
from core.planning.plan import PlanReason
from core.planning.search.fit import SearchResult
from core.planning.search.ladder import BUSY_TOKENS, with_micro
from core.planning.search.requirements import MOST_VAE_BATCH, Requirements, shards_as_required
from core.planning.search.timed_candidate import TimedCandidate
from core.planning.time.overheads import COMPILE_S
from core.planning.time.speed import step_time
from core.profile.declare import NameSystem
from core.profile.schema import FIELD_NAMES


def concessions(needs: Requirements, result: SearchResult, budget: int) -> Iterator[Concession]:
    """Yield what gave way, in the order of a reader's questions: machinery, method, batch, lengths, time."""
    timed = result.best
    yield from needs.concessions
    yield from _gpus(needs, result)
    yield from _sharding(needs, timed, budget)
    yield from _quality(needs, timed, budget)
    yield from _batch(needs, timed, budget)
    yield from _unsupported(needs, timed)
    yield from _images(needs, timed, budget)
    yield from _time(needs, timed)


#: The memory terms that a concession reduces, which its reason names.
PASSES = ("activations", "logits", "layer at work")
STATES = ("weights", "optimizer", "gradients", "ddp buckets")
TRAINED = ("optimizer", "adapter", "gradients", "ddp buckets", "optimizer work", "adapter in bf16")


def over_budget(candidate: RunCandidate, budget: int, about: tuple[str, ...] = PASSES) -> str:
    """Describe what forced a concession: the largest of the terms `about`, the total, the budget."""
    memory = memory_of(candidate, budget)
    named = [term for term in memory.terms if term.name in about] or memory.terms
    largest = max(named, key=lambda term: term.bytes)
    return (
        f"{show_bytes(largest.bytes)} of {largest.name}, {show_bytes(memory.total_bytes)} in all, "
        f"over the {show_bytes(budget)} budget"
    )


def _gpus(needs: Requirements, result: SearchResult) -> Iterator[Concession]:
    got, choice = result.best.candidate.world, result.choice
    if got == choice.wanted or choice.by_value or needs.targets.gpu_strategy is GpuStrategy.AUTO:
        return
    if needs.engine is Engine.AI_TOOLKIT:
        reason = choice.why
    elif got < choice.wanted:
        reason = f"{choice.why}; {got} can be had"
    else:
        reason = f"{choice.why}; fewer do not fit in memory or time"
    yield conceded("gpus", choice.wanted, got, reason)


def _sharding(needs: Requirements, timed: TimedCandidate, budget: int) -> Iterator[Concession]:
    candidate = timed.candidate
    by_profile = shards_as_required(needs, candidate.world)
    sharded = candidate.parallelism is Parallelism.FSDP
    above = needs.targets.fsdp_above
    if by_profile and not sharded:
        gathered = candidate.completion * candidate.shape.params * 2
        reason = f"generation would gather {show_bytes(gathered)} per step; the model fits one GPU"
        yield conceded("fsdp_above", above, None, reason)
    elif sharded and not by_profile and above is not None:
        reason = f"unsharded {over_budget(vary(candidate, parallelism=Parallelism.DDP), budget, STATES)}"
        yield conceded("fsdp_above", above, needs.model.params_total, reason)
    elif above is not None and candidate.world == 1 and needs.model.params_total >= above:
        yield conceded("fsdp_above", above, None, "there is nothing to shard over on one GPU")


def _quality(needs: Requirements, timed: TimedCandidate, budget: int) -> Iterator[Concession]:
    required, candidate = timed.required, timed.candidate
    if candidate.method is not required.method:
        smallest = vary(with_micro(required, 1), checkpointing=True)
        reason = over_budget(smallest, budget, STATES)
        yield conceded("method", required.method.value, candidate.method.value, reason)
    if required.ema and not candidate.ema:
        reason = over_budget(vary(candidate, ema=True), budget, ("average",))
        yield conceded("ema_decay", needs.targets.ema_decay, None, reason)
    asked = needs.targets.optimizer
    if candidate.optimizer is not asked:
        reason = _optimizer_reason(needs, timed, budget)
        yield conceded("optimizer", asked.value, candidate.optimizer.value, reason)
    if candidate.length < required.length:
        longer = vary(candidate, length=required.length)
        share = f"; {timed.seq.dropped_share:.1%} of the rows are longer" if timed.seq.dropped_share else ""
        yield conceded("sequence_len", required.length, candidate.length, over_budget(longer, budget) + share)
    if not candidate.full and candidate.rank < needs.rank:
        higher = vary(candidate, rank=needs.rank)
        yield conceded("lora_r", needs.rank, candidate.rank, over_budget(higher, budget, TRAINED))
    if not candidate.full:
        yield from _experts(needs)


def _experts(needs: Requirements) -> Iterator[Concession]:
    """transformers 5 keeps a layer's experts in single tensors, which are no layers to peft."""
    asked = needs.targets.lora_target_modules
    shapes = linear_shapes(needs.model)
    experts = [shape for shape in shapes if shape.name.startswith(EXPERT_PREFIX)]
    missed = [shape for shape in experts if not asked or shape.name.removeprefix(EXPERT_PREFIX) in asked]
    if not missed:
        return
    adapted = [
        shape.name for shape in shapes if not shape.routed and is_adapted(needs.model, shape.name, asked)
    ]
    params = show_params(sum(shape.params for shape in missed))
    total = show_params(needs.model.params_total)
    reason = f"{params} of {total} are experts in single tensors, out of LoRA's reach"
    wanted = ", ".join(asked) if asked else "every linear layer"
    yield conceded("lora_target_modules", wanted, ", ".join(adapted) or "none", reason)


def adapter_reach(needs: Requirements, candidate: RunCandidate) -> str | None:
    """Say what part of the weights the adapter changes, of a mixture of experts or with some layers only."""
    asked, model = needs.targets.lora_target_modules, needs.model
    if candidate.full or model.is_image or (model.moe is None and not asked and not model.no_adapter):
        return None
    shapes = [shape for shape in linear_shapes(model) if not shape.routed]
    reached = sum(shape.params for shape in shapes if is_adapted(model, shape.name, asked))
    share = f"the adapter reaches {reached / model.params_total:.1%} of the weights"
    left_out = sorted(model.no_adapter.intersection(shape.name for shape in shapes))
    if left_out:
        share += f": {', '.join(left_out)} of its Mamba layers cannot have one"
    return share if model.moe is None else f"{share}: routed experts are left out"


def _optimizer_reason(needs: Requirements, timed: TimedCandidate, budget: int) -> str:
    candidate, required, asked = timed.candidate, timed.required.optimizer, needs.targets.optimizer
    if candidate.optimizer is required or (candidate.sharded and asked is not required):
        return "FSDP2 cannot shard its states"
    return over_budget(vary(candidate, optimizer=asked), budget, ("optimizer",))


def _batch(needs: Requirements, timed: TimedCandidate, budget: int) -> Iterator[Concession]:
    candidate, targets = timed.candidate, needs.targets
    asked, got = needs.effective(candidate.world), candidate.effective
    if got != asked:
        yield conceded("effective_batch_size", asked, got, _effective_reason(timed))
    wanted = min(needs.micro_target, candidate.per_gpu)
    if needs.limits.max_micro_batch < targets.micro_batch_size:
        reason = f"limits.max_micro_batch is {needs.limits.max_micro_batch}"
        yield conceded("micro_batch_size", targets.micro_batch_size, needs.limits.max_micro_batch, reason)
    if candidate.micro < timed.required.micro:
        yield conceded("micro_batch_size", wanted, candidate.micro, _micro_reason(timed, budget))
        steps = targets.gradient_accumulation_steps
        if candidate.accumulation != steps and targets.effective_batch_size is None:
            reason = f"keeps {got} sequences per step over {candidate.world} GPUs"
            yield conceded("gradient_accumulation_steps", steps, candidate.accumulation, reason)
    if candidate.checkpointing and targets.gradient_checkpointing is False:
        yield conceded("gradient_checkpointing", False, True, _checkpointing_reason(timed, budget))


def _effective_reason(timed: TimedCandidate) -> str:
    candidate = timed.candidate
    if not candidate.task.generates:
        return f"a whole number of sequences on each of {candidate.world} GPUs"
    group = candidate.generations
    if candidate.per_gpu < timed.required.per_gpu:
        return "the completions of a step are generated together and did not fit in memory"
    return f"Axolotl wants groups of {group} completions, and {group} × {candidate.world} on each GPU"


def _micro_reason(timed: TimedCandidate, budget: int) -> str:
    """Either it does not fit, or it had to be checkpointed and more would gain nothing."""
    larger = with_micro(timed.candidate, timed.required.micro)
    if peak_bytes(larger) > budget:
        return over_budget(larger, budget)
    plain = vary(larger, checkpointing=False)
    tokens = timed.candidate.micro * timed.candidate.length
    busy = max(tokens, BUSY_TOKENS)
    return f"{over_budget(plain, budget)}; with checkpointing {busy:,} tokens keep the GPU busy"


def _checkpointing_reason(timed: TimedCandidate, budget: int) -> str:
    plain = vary(timed.candidate, checkpointing=False)
    if peak_bytes(plain) <= budget:
        plain = with_micro(plain, timed.required.micro)
    return over_budget(plain, budget)


def no_fp8(candidate: RunCandidate) -> str | None:
    """Why the native trainer computes in bf16 despite fp8 (`trainer/native/speed.py`), or None."""
    if candidate.engine is not Engine.NATIVE:
        return None
    if not candidate.full:
        return "the frozen weights of a LoRA run gain nothing from fp8 products"
    if candidate.compile_mode is None:
        return "without compilation its scaling makes steps several times slower"
    return None


def _unsupported(needs: Requirements, timed: TimedCandidate) -> Iterator[Concession]:
    """Concede what the engine leaves off, or replaces, whatever the memory."""
    candidate, targets = timed.candidate, needs.targets
    if (asked := timed.required.compile_mode) is not None and candidate.compile_mode is None:
        yield conceded("compile_mode", asked.value, None, _not_won_back(timed, asked))
    if candidate.fp8 and (why := no_fp8(candidate)) is not None:
        yield conceded("fp8", True, False, why)
    static, mode = timed.seq.packing and not candidate.checkpointing, candidate.compile_mode
    with_graphs = mode is not None and mode is not CompileMode.DEFAULT
    if candidate.engine is Engine.NATIVE and not static and mode and with_graphs:
        why = "CUDA graphs replay fixed shapes; rows of many lengths and checkpointing have none"
        yield conceded("compile_mode", mode.value, "max-autotune-no-cudagraphs", why)
    if candidate.ema and not candidate.keeps_average:
        yield conceded("ema_decay", targets.ema_decay, None, "sd-scripts has no moving average")


def _not_won_back(timed: TimedCandidate, mode: CompileMode) -> str:
    compiled = vary(timed.candidate, compile_mode=mode)
    faster = step_time(compiled, timed.seq.work(compiled.micro)).seconds / timed.step.seconds
    train_s = timed.schedule.train_s
    saved = show_seconds(max(train_s * (1 - faster), 0.0))
    return (
        f"{show_seconds(COMPILE_S[mode])} of compiling would save {saved} of {show_seconds(train_s)} of steps"
    )


def _images(needs: Requirements, timed: TimedCandidate, budget: int) -> Iterator[Concession]:
    before, after = timed.required.image, timed.candidate.image
    if before is None or after is None:
        return
    reason, asked = over_budget(timed.required, budget), needs.targets.vae_batch_size
    if after.vae_batch < asked:
        why = f"{MOST_VAE_BATCH} encode as fast: it is for the latents' cache alone, which takes seconds"
        if after.vae_batch < before.vae_batch:
            why = reason
        yield conceded("vae_batch_size", asked, after.vae_batch, why)
    if before.twin and not after.twin:
        yield conceded("image.twin", True, False, reason)
    if after.quantized and not before.quantized:
        yield conceded("quantize_base", None, True, reason)
    if before.text_adapter and not after.text_adapter:
        yield conceded("text_encoder_lr", "trained", None, reason)
    if after.text_offloaded and needs.targets.caption_dropout:
        yield conceded("caption_dropout", needs.targets.caption_dropout, 0.0, reason)
    if after.resolution < before.resolution:
        yield conceded("resolutions", list(before.resolutions), list(after.resolutions), reason)


def epochs_between_files(timed: TimedCandidate) -> int:
    return max(timed.schedule.save_every // max(timed.schedule.per_epoch, 1), 1)


def _time(needs: Requirements, timed: TimedCandidate) -> Iterator[Concession]:
    schedule, targets = timed.schedule, needs.targets
    if not schedule.complete:
        field = "num_epochs" if targets.max_steps is None or targets.num_epochs is not None else "max_steps"
        wanted: JsonValue = round(schedule.wanted_epochs, 2) if field == "num_epochs" else schedule.wanted
        got: JsonValue = round(schedule.epochs, 2) if field == "num_epochs" else schedule.total
        seconds = schedule.wanted * timed.rate.step_s
        reason = (
            f"{schedule.wanted:,} steps of {timed.rate.step_s:.3g} s are {show_seconds(seconds)}; "
            f"{show_seconds(schedule.train_s)} are left for training"
        )
        yield conceded(field, wanted, got, reason)
    total, asked = schedule.total, targets.eval_steps
    if schedule.eval_rows and asked and min(schedule.eval_every, total) > asked:
        share = f"limits.eval_share is {needs.limits.eval_share:.0%}"
        reason = f"an evaluation takes {show_seconds(timed.rate.eval_s)}; {share}"
        yield conceded("eval_steps", targets.eval_steps, schedule.eval_every, reason)
    elif schedule.eval_rows and asked and schedule.eval_every < min(asked, total):
        patience = targets.early_stopping_patience or 0
        reason = f"early_stopping_patience {patience} means {2 * patience} evaluations in {total:,} steps"
        yield conceded("eval_steps", asked, schedule.eval_every, reason)
    if (
        targets.save_steps
        and schedule.save_every > targets.save_steps
        and schedule.total > targets.save_steps
    ):
        reason = "checkpoints fall on evaluations"
        yield conceded("save_steps", targets.save_steps, schedule.save_every, reason)
    between = targets.save_every_epochs
    if between and timed.candidate.engine is Engine.KOHYA and epochs_between_files(timed) < between:
        reason = f"{schedule.epochs:.3g} epochs in all, of which some are to leave a file"
        yield conceded("save_every_epochs", between, epochs_between_files(timed), reason)
    if schedule.keep < schedule.wanted_keep:
        yield conceded(
            "save_total_limit", schedule.wanted_keep, schedule.keep, "the disk holds no more of them"
        )


def reasons_for(needs: Requirements, result: SearchResult, given: list[Concession]) -> dict[str, PlanReason]:
    """The concession's reason, else the planner's own, else the profile's line, else the default."""
    forced = {concession.field: concession.reason for concession in given}
    own = _planner_reasons(needs, result)
    reasons: dict[str, PlanReason] = {}
    for path, target in FIELD_NAMES[NameSystem.PLAN].items():
        origin = needs.profile.origin(f"targets.{target}")
        if target in forced:
            reasons[path] = PlanReason(text=forced[target])
        elif path in own:
            reasons[path] = PlanReason(text=own[path])
        elif needs.profile.is_set(f"targets.{target}"):
            reasons[path] = PlanReason(text="as the profile asks", source=str(origin))
        else:
            reasons[path] = PlanReason(text="the default", source="default")
    return reasons


_OF_THE_RECIPE = (
    "adapter.rank",
    "adapter.alpha",
    "batch.micro",
    "batch.accumulation",
    "optimizer.name",
    "optimizer.learning_rate",
    "optimizer.schedule",
    "optimizer.warmup_steps",
    "optimizer.weight_decay",
    "optimizer.max_grad_norm",
)


def _planner_reasons(needs: Requirements, result: SearchResult) -> dict[str, str]:
    timed, targets = result.best, needs.targets
    candidate, seq, schedule = timed.candidate, timed.seq, timed.schedule
    least = f", at least {targets.val_rows_min}" if targets.val_rows_min else ""
    reasons = {
        "gpus": result.choice.why,
        "parallelism": _parallelism_reason(candidate),
        "steps.total": f"{schedule.epochs:.3g} epochs of {schedule.per_epoch:,} steps",
        "optimizer.learning_rate": guarded_rate(needs, timed)[1],
        "steps.eval_rows": f"{targets.val_set_size:.0%} of the rows{least}, at most {targets.val_rows_max}",
    }
    if targets.sequence_len is None and not needs.model.is_image:
        total = needs.data.total
        made = f"the longest row has {total.max} tokens, and none is left out"
        said = f"99th percentile of the rows is {total.p99} tokens"
        reasons["sequence.length"] = made if needs.task.task_type.makes_rows else said
    if seq.packing and targets.sample_packing is None:
        rows = seq.rows / max(seq.per_epoch, 1)
        reasons["sequence.packing"] = f"about {rows:.1f} rows fill one sequence"
    if targets.attention is None and needs.model.attention is not Attention.FLASH_2:
        reasons["precision.attention"] = f"{needs.model.architecture} has no flash attention"
    if targets.eval_steps is None:
        reasons["steps.eval_every"] = f"about ten times; one takes {show_seconds(timed.rate.eval_s)}"
    if targets.save_steps is None:
        reasons["steps.save_every"] = "with each evaluation"
    if needs.recipe is not None:
        reasons |= dict.fromkeys(_OF_THE_RECIPE, "the family's recipe")
        reasons["image.resolutions"] = "as pictures are scored"
        reasons["steps.epochs"] = "by the clock; the curve of held-out pictures ends it, mostly before"
    elif targets.num_epochs is None:
        clock = "all that fit before the reserve" if not schedule.complete else "the profile's upper limit"
        reasons["steps.epochs"] = clock
    if targets.method is None:
        reasons["method"] = f"full below {targets.full_below or 0:,} parameters"
    if targets.gradient_checkpointing is None:
        reasons["precision.gradient_checkpointing"] = (
            "memory asks for it" if candidate.checkpointing else "memory allows it"
        )
    if targets.effective_batch_size is not None:
        reasons["batch.accumulation"] = (
            f"{targets.effective_batch_size} sequences per step over {candidate.world} GPUs"
        )
    return reasons


def _parallelism_reason(candidate: RunCandidate) -> str:
    if candidate.parallelism is Parallelism.SINGLE:
        return "one GPU"
    gradients = show_bytes(candidate.trained_params * candidate.trained_width)
    network = f", over {candidate.network * 8 / 1e9:g} Gbit/s between nodes" if candidate.nodes > 1 else ""
    if candidate.parallelism is Parallelism.DDP:
        return f"the model fits one GPU; {gradients} of gradients are exchanged per step{network}"
    weights = show_bytes(candidate.shape.params * 2)
    if candidate.hybrid:
        split = f"{weights} of weights are split over the {candidate.on_node} GPUs of each node"
        return f"{split}; {gradients} of gradients are exchanged per step{network}"
    return f"{weights} of weights are split over {candidate.world} GPUs{network}"
