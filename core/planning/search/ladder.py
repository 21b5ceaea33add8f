"""Make the requirements fit into the memory of one GPU, by steps in a fixed order.

First what changes nothing about the result: checkpointing, a smaller micro batch with more accumulation,
FSDP instead of DDP. Then what does, mildest first: an 8-bit optimizer, LoRA instead of a full fine-tune,
shorter sequences, a lower rank, a 4-bit base. `docs/planning.md` lists the order with its reasons.

A smaller micro batch comes before checkpointing as long as a pass still holds `BUSY_TOKENS`: recomputing
costs a third more time, a smaller pass nothing until launching kernels becomes the bottleneck. For the same
reason a micro batch that had to be checkpointed is not made larger than that.

A moving average gives way before the rank, and before everything else where the model is sharded: there it
is kept if it fits beside all the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from core.domain.choices import Engine, Method, Optimizer, Parallelism
from core.planning.candidate import ImageCandidate, RunCandidate, vary
from core.planning.memory import peak as memory
from core.planning.search.requirements import (
    SHARDABLE,
    Requirements,
    can_shard,
    divisors,
    largest_divisor,
    shards_as_required,
    shards_within_nodes,
)
from core.planning.time.sequences import natural_length, shorter_lengths
from core.planning.time.speed import generate_seconds

#: Below this many tokens per pass an H100 waits for Python; above twice as many nothing is gained.
BUSY_TOKENS = 4096
#: Enough rank for nearly every task's data: halving down to it costs little.
AMPLE_RANK = 64
#: Fallback resolutions of images.
RESOLUTIONS = (768, 512)
Fits = Callable[[RunCandidate], bool]
T = TypeVar("T")


def fit_memory(
    needs: Requirements, required: RunCandidate, budget: float, lossy: bool = True
) -> tuple[RunCandidate | None, int]:
    """Find the mildest variation of `required` that fits, or None; and its cost, 0 for a lossless one."""
    fits = partial(_fits, budget=budget)
    candidate, cost = fit_lossless(needs, required, fits), 0
    if candidate is None and _vllm_unasked(needs, required):
        # Before anything is given up for it, it is.
        required = vary(required, vllm_share=0.0)
        candidate = fit_lossless(needs, required, fits)
    if candidate is None and lossy:
        candidate, cost = _by_variation(needs, required, fits)
    if candidate is None:
        return None, cost
    candidate = _with_generation(needs, candidate, budget)
    return _with_average(needs, required, candidate, fits), cost


def _vllm_unasked(needs: Requirements, candidate: RunCandidate) -> bool:
    """Return whether vLLM would generate although nobody asked for it."""
    return candidate.vllm_share > 0 and needs.targets.grpo_vllm is None


#: Completions that are worth a generation: fewer at once take as long.
LEAST_TOGETHER = 16


def _fits(candidate: RunCandidate, budget: float) -> bool:
    """A generation may let completions wait."""
    if candidate.task.generates and not candidate.vllm_share:
        least = candidate.generations * math.ceil(LEAST_TOGETHER / candidate.generations)
        candidate = vary(candidate, together=least if least < candidate.per_gpu else 0)
    return memory.fits_memory(candidate, budget)


def _with_generation(needs: Requirements, candidate: RunCandidate, budget: float) -> RunCandidate:
    """Completions at once and layers gathered for a whole generation share the memory: the fastest choice
    that fits. Nothing else changes with them."""
    if not candidate.task.generates or candidate.vllm_share:
        return candidate
    each, prompts = candidate.generations, candidate.per_gpu // candidate.generations
    most = max(min(needs.learned.together or candidate.per_gpu, candidate.per_gpu) // each, 1)
    if not candidate.gathers_to_generate:
        return _with_most_together(candidate, most, budget)
    # Of each number of rounds the fewest at once, which leave the most room for layers.
    counts = sorted({math.ceil(prompts / rounds) for rounds in range(1, prompts + 1)}, reverse=True)
    ways = [vary(candidate, together=each * n if n < prompts else 0) for n in counts if n <= most]
    ways = [_with_gathered_layers(needs, way, budget) for way in ways]
    fitting = [way for way in ways if memory.generation_fits(way, budget)]
    return min(fitting, key=generate_seconds) if fitting else ways[-1]


def _with_most_together(candidate: RunCandidate, most: int, budget: float) -> RunCandidate:
    """Generate as many completions at once as fit, those of `most` prompts, all of a prompt together."""
    each, prompts = candidate.generations, candidate.per_gpu // candidate.generations
    counts = [vary(candidate, together=each * n if n < prompts else 0) for n in range(most, 0, -1)]
    at = _first(counts, partial(memory.generation_fits, budget=budget))
    return counts[-1] if at is None else counts[at]


def _with_average(
    needs: Requirements, required: RunCandidate, candidate: RunCandidate, fits: Fits
) -> RunCandidate:
    averaged = vary(candidate, ema=required.ema and not needs.learned.no_average)
    return averaged if fits(averaged) else candidate


def _by_variation(needs: Requirements, required: RunCandidate, fits: Fits) -> tuple[RunCandidate | None, int]:
    """The cost is the number of milder variations, `required` among them."""
    cost = 1
    for falling in variations(needs, required):
        at = _first(falling, lambda base: any(fits(least) for least in _least(needs, base)))
        candidate = None if at is None else fit_lossless(needs, falling[at], fits)
        if at is not None and candidate is not None:
            return _restored(needs, required, candidate, fits), cost + at
        cost += len(falling)
    return None, cost


def _first(falling: Sequence[T], fits: Callable[[T], bool]) -> int | None:
    """The index of the first that fits, by bisection: none needs more memory than the one before it."""
    if not falling:
        return None
    if fits(falling[0]):
        return 0
    low, high = 1, len(falling) - 1
    if high < low or not fits(falling[high]):
        return None
    while low < high:
        middle = (low + high) // 2
        if fits(falling[middle]):
            high = middle
        else:
            low = middle + 1
    return high


def _with_gathered_layers(needs: Requirements, candidate: RunCandidate, budget: float) -> RunCandidate:
    """Gather as many layers for a whole generation as fit."""
    # With all of them our sampling generates, which may need less than the engine's own with fewer.
    most = _most_layers(needs, candidate)
    whole = vary(candidate, gathered_layers=most)
    if memory.generation_fits(whole, budget):
        return whole
    low, high = 0, max(most - 1, 0)
    while low < high:
        middle = (low + high + 1) // 2
        if memory.generation_fits(vary(candidate, gathered_layers=middle), budget):
            low = middle
        else:
            high = middle - 1
    return vary(candidate, gathered_layers=low)


def _most_layers(needs: Requirements, candidate: RunCandidate) -> int:
    learned, layers = needs.learned.gathered_layers, candidate.shape.layers
    return layers if learned is None else min(learned, layers)


def _restored(
    needs: Requirements, required: RunCandidate, candidate: RunCandidate, fits: Fits
) -> RunCandidate:
    """Take back what was given up on the way and fits after all: the optimizer, then rank. Rank counts more
    than a moving average."""
    if candidate.full or candidate.image is not None:
        return candidate
    own_optimizer = vary(candidate, optimizer=required.optimizer)
    may_return = needs.learned.optimizer in (None, required.optimizer)
    if candidate.parallelism is required.parallelism and may_return and fits(own_optimizer):
        candidate = own_optimizer
    most = needs.learned.rank or needs.rank
    ranks = (needs.rank, *_halves(needs.rank, candidate.rank))
    higher = [vary(candidate, rank=rank, ema=False) for rank in ranks if candidate.rank < rank <= most]
    at = _first(higher, fits)
    return candidate if at is None else higher[at]


def _least(needs: Requirements, base: RunCandidate) -> Iterator[RunCandidate]:
    """The smallest forms of a variation. If none fits, the variation need not be searched."""
    for way in reversed([way for ways in _shardings(needs, base) for way in ways]):
        yield vary(way, micro=1, accumulation=way.per_gpu, checkpointing=True)


def fit_lossless(needs: Requirements, base: RunCandidate, fits: Fits) -> RunCandidate | None:
    """Vary batch, accumulation, checkpointing and sharding, which leave the result of training the same."""
    candidates = (_by_batch(ways, base, fits) for ways in _shardings(needs, base))
    return next((candidate for candidate in candidates if candidate is not None), None)


def _by_batch(ways: list[RunCandidate], base: RunCandidate, fits: Fits) -> RunCandidate | None:
    for way in ways:
        busy = busy_micro(way)
        most = way.micro if way.parallelism is base.parallelism else busy
        if not way.checkpointing and (candidate := _largest(way, busy, most, fits)):
            return candidate
        checkpointed = way if way.checkpointing else vary(way, checkpointing=True)
        if candidate := _largest(checkpointed, busy, most if base.checkpointing else busy, fits):
            return candidate
    for micro in divisors(base.per_gpu, busy_micro(base) - 1):
        for way in ways:
            small = vary(way, micro=micro, accumulation=way.per_gpu // micro, checkpointing=True)
            if fits(small):
                return small
    return None


def _shardings(needs: Requirements, base: RunCandidate) -> list[list[RunCandidate]]:
    """The ways to split the run over its GPUs, in groups; a group is tried with every batch before the next.

    Sharding is the second choice unless the profile asks for it. With generation it is second even then, and
    sharding that gathers its layers for every token comes after everything else, smaller batches too.
    """
    if not can_shard(needs, base.world):
        return [[base]]
    # The profile's optimizer again where sharding had replaced it.
    asked = needs.targets.optimizer
    own = asked if base.optimizer is SHARDABLE.get(asked, asked) else base.optimizer
    unchanged = base.parallelism is Parallelism.DDP and base.optimizer is own
    plain = base if unchanged else vary(base, parallelism=Parallelism.DDP, optimizer=own, hybrid=False)
    if base.method is Method.QLORA and base.task.has_pairs:
        return [[plain]]  # Axolotl refuses 4-bit bases under FSDP2 for DPO
    if _vllm_unasked(needs, base):
        return [[plain]]
    shardable = SHARDABLE.get(base.optimizer, base.optimizer)
    sharded = vary(base, parallelism=Parallelism.FSDP, optimizer=shardable, ema=False, hybrid=False)
    if sharded.gathers_to_generate:
        whole = vary(sharded, gathered_layers=_most_layers(needs, base))
        unsharded = [] if needs.learned.sharded else [plain]
        return [[*unsharded, whole], [vary(sharded, gathered_layers=0)]]
    # The network is slower than the links within a node: layers are gathered over it only for want of memory.
    within_nodes = [vary(sharded, hybrid=True)] if shards_within_nodes(needs, base.world) else []
    ways = [*within_nodes, sharded]
    return [ways if shards_as_required(needs, base.world) else [plain, *ways]]


def _largest(base: RunCandidate, least: int, most: int, fits: Fits) -> RunCandidate | None:
    """The largest micro batch from `least` to `most` that fits; memory never falls with it."""
    choices = [micro for micro in divisors(base.per_gpu, most) if micro >= least]
    at = _first(choices, lambda micro: fits(with_micro(base, micro)))
    return None if at is None else with_micro(base, choices[at])


def busy_micro(base: RunCandidate) -> int:
    """The smallest micro batch that keeps the GPU busy, at most the candidate's own."""
    if base.image is not None:
        return 1
    sides = 2 if base.task.has_pairs else 1
    enough = [m for m in divisors(base.per_gpu, base.micro) if m * sides * base.length >= BUSY_TOKENS]
    return enough[-1] if enough else base.micro


def with_micro(base: RunCandidate, micro: int) -> RunCandidate:
    """The same effective batch in passes of another size."""
    if micro == base.micro:
        return base
    return vary(base, micro=micro, accumulation=base.per_gpu // micro)


def variations(needs: Requirements, base: RunCandidate) -> Iterator[list[RunCandidate]]:
    """Yield what costs quality, mildest first, in groups; within a group each needs less memory."""
    if base.image is not None:
        yield list(_images(needs, base, base.image))
        return
    if needs.method is Method.FULL:
        yield [vary(base, optimizer=eight_bit(base))]
        base = vary(base, method=Method.LORA, rank=needs.rank)
        yield [base]
    if base.task.generates:
        yield list(_smaller_groups(needs, base))
    yield from _adapters(needs, base)


def _adapters(needs: Requirements, base: RunCandidate) -> Iterator[list[RunCandidate]]:
    """Rows beyond the 99th percentile, then rank above `AMPLE_RANK`, then rows, then all the rest."""
    base = with_length(base, min(base.length, natural_length(needs.data, needs.targets, base.length)))
    small = vary(base, optimizer=eight_bit(base))
    least = max(needs.limits.min_lora_r, 1)
    ranks = [small, *(vary(small, rank=rank) for rank in _halves(base.rank, max(AMPLE_RANK, least)))]
    yield [base, *ranks]
    base = ranks[-1]
    shorter = shorter_lengths(needs.data, base.length, needs.limits.min_sequence_len)
    yield [with_length(base, length) for length in shorter]
    quantised = vary(base, method=Method.QLORA) if may_quantise(base) else base
    if quantised is not base:
        yield [quantised]
    lowest = vary(quantised, rank=min(base.rank, least))
    yield [with_length(lowest, length) for length in shorter]


def _halves(rank: int, least: int) -> Iterator[int]:
    """Return lower ranks down to `least`; above 8 they are multiples of 8, the tile of matrix units."""
    while (half := rank // 2) >= least:
        rank = max(half - half % 8 if half > 8 else half, least)
        yield rank


def with_length(base: RunCandidate, length: int) -> RunCandidate:
    return vary(base, length=length, completion=min(base.completion, max(length - 64, 1)))


def _smaller_groups(needs: Requirements, base: RunCandidate) -> Iterator[RunCandidate]:
    """GRPO generates a whole step at once: fewer completions per step, down to what Axolotl accepts."""
    least = needs.targets.grpo_generations * base.world
    completions = base.per_gpu
    while completions > least:
        completions = max(completions // 2 // least, 1) * least
        micro = largest_divisor(completions, base.micro)
        yield vary(base, micro=micro, accumulation=completions // micro)


def may_quantise(base: RunCandidate) -> bool:
    """Not on a CPU, where a 4-bit base crawls."""
    return base.engine is Engine.AXOLOTL and base.kind.compute_capability > (0, 0)


def eight_bit(base: RunCandidate) -> Optimizer:
    if base.parallelism is Parallelism.FSDP:
        return Optimizer.ADAMW_TORCH_8BIT
    already = (Optimizer.ADAFACTOR, Optimizer.LION_8BIT, Optimizer.PAGED_ADAMW_8BIT)
    return base.optimizer if base.optimizer in already else Optimizer.ADAMW_BNB_8BIT


def _images(needs: Requirements, base: RunCandidate, image: ImageCandidate) -> Iterator[RunCandidate]:
    """Smaller latent batches cost only seconds; then 8-bit base, frozen text encoders, ranks, dropped
    captions (only they keep the encoders in memory then), resolutions."""
    lowest = max(needs.limits.min_lora_r, 1)
    if base.engine is Engine.PICTURES:  # pictures are trained at the size at which they are scored
        base = vary(base, image=replace(image, twin=False))
        yield base
        yield from (vary(base, rank=rank) for rank in _halves(base.rank, lowest))
        return
    image = replace(image, vae_batch=1)
    yield vary(base, image=image)
    if base.engine is Engine.AI_TOOLKIT and needs.targets.quantize_base is None:
        image = replace(image, quantized=True)
        yield vary(base, image=image)
    if image.text_adapter:
        offloaded = needs.targets.caption_dropout == 0
        image = replace(image, text_adapter=False, text_offloaded=offloaded)
        yield vary(base, image=image)
    base = vary(base, image=image)
    yield from (vary(base, rank=rank) for rank in _halves(base.rank, lowest))
    least = vary(base, rank=min(base.rank, lowest))
    if not image.text_offloaded:
        image = replace(image, text_offloaded=True)
        least = vary(least, image=image)
        yield least
    for smaller in smaller_resolutions(image.resolutions):
        yield vary(least, image=replace(image, resolutions=smaller))


def smaller_resolutions(resolutions: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Without the larger ones; the next smaller one where none is left."""
    for most in RESOLUTIONS:
        if most < max(resolutions):
            yield tuple(side for side in resolutions if side <= most) or (most,)
