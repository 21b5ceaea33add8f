"""Making a wish fit into the memory of one GPU, by steps in a fixed order.

First what changes nothing about the result: checkpointing, a smaller micro batch with more accumulation, FSDP
instead of DDP. Then what does, mildest first: an 8-bit optimizer, LoRA instead of a full fine-tune, shorter
sequences, a lower rank, a 4-bit base. `docs/planning.md` lists the order with its reasons.

A smaller micro batch is taken before checkpointing as long as a pass still holds `BUSY_TOKENS`: recomputing
costs a third more time, a smaller pass nothing until launching kernels becomes the bottleneck. For the same
reason a micro batch that had to be checkpointed is not made larger than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from core.choices import Engine, Method, Optimizer, Parallelism
from core.planning import memory
from core.planning.sequences import natural_length, shorter_lengths
from core.planning.setup import Picture, Setup, vary
from core.planning.start import SHARDABLE, can_shard, divisors, shards_by_wish, start
from core.planning.wishes import Wish
from core.tasks import TaskType

#: Below this many tokens per pass an H100 waits for Python; above twice as many nothing is gained.
BUSY_TOKENS = 4096
#: A rank that holds what nearly every task's data can teach: halving down to it costs little.
AMPLE_RANK = 64
#: Resolutions that pictures may fall back to.
RESOLUTIONS = (768, 512)
Fits = Callable[[Setup], bool]
T = TypeVar("T")


class Fitted(NamedTuple):
    """A setup that fits, and how much of the wish's quality it cost: 0 for none."""

    wished: Setup
    setup: Setup
    cost: int


def fit_memory(wish: Wish, world: int, budget: float, lossy: bool = True) -> Fitted | None:
    """The mildest variation of the wish that fits; None when none does."""
    wished, fits = start(wish, world), partial(memory.fits, budget=budget)
    found, cost = lossless(wish, wished, fits), 0
    if found is None and lossy:
        found, cost = _by_variation(wish, wished, fits)
    return Fitted(wished, keeping_layers(found, budget), cost) if found else None


def _by_variation(wish: Wish, wished: Setup, fits: Fits) -> tuple[Setup | None, int]:
    """With the number of variations that lie before what was found, the wish among them."""
    cost = 1
    for falling in variations(wish, wished):
        at = _first(falling, lambda one: any(fits(least) for least in _least(wish, one)))
        found = None if at is None else lossless(wish, falling[at], fits)
        if at is not None and found is not None:
            return _restored(wish, wished, found, fits), cost + at
        cost += len(falling)
    return None, cost


def _first(falling: Sequence[T], fits: Callable[[T], bool]) -> int | None:
    """Where the first lies that fits; none needs more memory than the one before it."""
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


def keeping_layers(found: Setup, budget: float) -> Setup:
    """As many layers as fit stay gathered while it generates, where not all of them do: nothing else changes
    with them."""
    if not found.gathers_to_generate or found.whole:
        return found
    low, high = 0, found.shape.layers
    while low < high:
        middle = (low + high + 1) // 2
        if memory.generation_fits(vary(found, whole=middle), budget):
            low = middle
        else:
            high = middle - 1
    return vary(found, whole=low)


def _restored(wish: Wish, wished: Setup, found: Setup, fits: Fits) -> Setup:
    """What was given up on the way and turned out not to be in the way."""
    if found.full or found.picture is not None:
        return found
    again = vary(found, optimizer=wished.optimizer)
    found = again if found.parallelism is wished.parallelism and fits(again) else found
    higher = [vary(found, rank=rank) for rank in (wish.rank, *_halves(wish.rank, found.rank + 1))]
    at = _first(higher, fits)
    return found if at is None else higher[at]


def _least(wish: Wish, base: Setup) -> Iterator[Setup]:
    """The variation at its smallest: what says at once whether looking closer is worth it."""
    for kind in reversed([kind for ways in _ways(wish, base) for kind in ways]):
        yield vary(kind, micro=1, accumulation=_per_gpu(kind), checkpointing=True)


def lossless(wish: Wish, base: Setup, fits: Fits) -> Setup | None:
    """Batch, accumulation, checkpointing and sharding; what is learned stays the same."""
    found = (_by_batch(ways, base, fits) for ways in _ways(wish, base))
    return next((one for one in found if one is not None), None)


def _by_batch(ways: list[Setup], base: Setup, fits: Fits) -> Setup | None:
    for kind in ways:
        busy = busy_micro(kind)
        first = kind.parallelism is base.parallelism
        most = kind.micro if first else busy
        if not kind.checkpointing and (found := _largest(kind, busy, most, fits)):
            return found
        again = kind if kind.checkpointing else vary(kind, checkpointing=True)
        if found := _largest(again, busy, most if base.checkpointing else busy, fits):
            return found
    for micro in divisors(_per_gpu(base), busy_micro(base) - 1):
        for kind in ways:
            small = vary(kind, micro=micro, accumulation=_per_gpu(kind) // micro, checkpointing=True)
            if fits(small):
                return small
    return None


def _ways(wish: Wish, base: Setup) -> list[list[Setup]]:
    """As wished first. Sharding is the second choice; with generation also where it is wished for, and after
    everything else, smaller batches too, where layers would have to be gathered for every token."""
    if not can_shard(wish, base.world):
        return [[base]]
    own = _own(wish, base)
    as_it_is = base.parallelism is Parallelism.DDP and base.optimizer is own
    plain = base if as_it_is else vary(base, parallelism=Parallelism.DDP, optimizer=own)
    if base.method is Method.QLORA and base.task is TaskType.DPO:
        return [[plain]]  # Axolotl refuses 4-bit bases under FSDP2 for DPO
    sharded = vary(
        base, parallelism=Parallelism.FSDP, optimizer=SHARDABLE.get(base.optimizer, base.optimizer)
    )
    if sharded.gathers_to_generate:
        return [[plain, vary(sharded, whole=base.shape.layers)], [vary(sharded, whole=0)]]
    return [[sharded] if shards_by_wish(wish, base.world) else [plain, sharded]]


def _own(wish: Wish, base: Setup) -> Optimizer:
    """The profile's optimizer again where sharding had replaced it."""
    asked = wish.targets.optimizer
    return asked if base.optimizer is SHARDABLE.get(asked, asked) else base.optimizer


def _largest(base: Setup, least: int, most: int, fits: Fits) -> Setup | None:
    """The largest micro batch from `least` to `most` that fits; memory never falls with it."""
    choices = [micro for micro in divisors(_per_gpu(base), most) if micro >= least]
    at = _first(choices, lambda micro: fits(with_micro(base, micro)))
    return None if at is None else with_micro(base, choices[at])


def busy_micro(base: Setup) -> int:
    """The smallest micro batch that keeps the GPU at work, at most the wished one."""
    if base.picture is not None:
        return 1
    sides = 2 if base.task is TaskType.DPO else 1
    enough = [m for m in divisors(_per_gpu(base), base.micro) if m * sides * base.length >= BUSY_TOKENS]
    return enough[-1] if enough else base.micro


def with_micro(base: Setup, micro: int) -> Setup:
    """The same effective batch in passes of another size."""
    if micro == base.micro:
        return base
    return vary(base, micro=micro, accumulation=_per_gpu(base) // micro)


def _per_gpu(base: Setup) -> int:
    return base.micro * base.accumulation


def variations(wish: Wish, base: Setup) -> Iterator[list[Setup]]:
    """What costs quality, mildest first, in groups of which each needs less and less memory."""
    if base.picture is not None:
        yield list(_pictures(wish, base, base.picture))
        return
    if wish.method is Method.FULL:
        yield [vary(base, optimizer=eight_bit(base))]
        base = vary(base, method=Method.LORA, rank=wish.rank)
        yield [base]
    if base.task is TaskType.GRPO:
        yield list(_smaller_groups(wish, base))
    yield from _adapters(wish, base)


def _adapters(wish: Wish, base: Setup) -> Iterator[list[Setup]]:
    """Rows beyond the 99th percentile, then rank that data can hardly fill, then rows, then all the rest."""
    base = with_length(base, min(base.length, natural_length(wish.data, wish.targets, base.length)))
    small = vary(base, optimizer=eight_bit(base))
    least = max(wish.limits.min_lora_r, 1)
    ranks = [small, *(vary(small, rank=rank) for rank in _halves(base.rank, max(AMPLE_RANK, least)))]
    yield [base, *ranks]
    base = ranks[-1]
    shorter = shorter_lengths(wish.data, base.length, wish.limits.min_sequence_len)
    yield [with_length(base, length) for length in shorter]
    quantised = vary(base, method=Method.QLORA) if _may_quantise(base) else base
    if quantised is not base:
        yield [quantised]
    lowest = vary(quantised, rank=min(base.rank, least))
    yield [with_length(lowest, length) for length in shorter]


def _halves(rank: int, least: int) -> Iterator[int]:
    while rank // 2 >= least:
        rank //= 2
        yield rank


def with_length(base: Setup, length: int) -> Setup:
    return vary(base, length=length, completion=min(base.completion, max(length - 64, 1)))


def _smaller_groups(wish: Wish, base: Setup) -> Iterator[Setup]:
    """GRPO generates a whole step at once: fewer completions per step, down to what Axolotl accepts."""
    least = wish.targets.grpo_generations * base.world
    together = _per_gpu(base)
    while together > least:
        together = max(together // 2 // least, 1) * least
        micro = min(base.micro, together)
        while together % micro:
            micro -= 1
        yield vary(base, micro=micro, accumulation=together // micro)


def _may_quantise(base: Setup) -> bool:
    """On a CPU a 4-bit base crawls."""
    return base.engine is Engine.AXOLOTL and base.kind.compute_capability > (0, 0)


def eight_bit(base: Setup) -> Optimizer:
    if base.parallelism is Parallelism.FSDP:
        return Optimizer.ADAMW_TORCH_8BIT
    already = (Optimizer.ADAFACTOR, Optimizer.LION_8BIT, Optimizer.PAGED_ADAMW_8BIT)
    return base.optimizer if base.optimizer in already else Optimizer.ADAMW_BNB_8BIT


def _pictures(wish: Wish, base: Setup, picture: Picture) -> Iterator[Setup]:
    """Smaller latent batches cost nothing but seconds; then an 8-bit base, ranks, resolutions."""
    picture = replace(picture, vae_batch=1)
    yield vary(base, picture=picture)
    if base.engine is Engine.AI_TOOLKIT and wish.targets.quantize_base is None:
        picture = replace(picture, quantized=True)
        yield vary(base, picture=picture)
    if not picture.text_put_away:
        picture = replace(picture, text_put_away=True, text_adapter=False)
        yield vary(base, picture=picture)
    base = vary(base, picture=picture)
    lowest = max(wish.limits.min_lora_r, 1)
    yield from (vary(base, rank=rank) for rank in _halves(base.rank, lowest))
    least = vary(base, rank=min(base.rank, lowest))
    for resolution in RESOLUTIONS:
        if resolution < picture.resolution:
            yield vary(least, picture=replace(picture, resolution=resolution))
