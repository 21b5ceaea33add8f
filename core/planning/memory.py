"""GPU memory of one rank: the terms of every moment of a training, and the worst of them.

A step has few moments that can be the worst: a layer in the forward pass, the loss, the first layer of the
backward pass (all that was kept is still there), the last one (all gradients are there), the optimizer's
step; beside the step, evaluation, GRPO's generation and the encoding of pictures. Which of them wins changes
with rank, depth, length and vocabulary, so all are computed and the largest counts.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.budget import MemoryBreakdown, MemoryPeak, MemoryTerm
from core.choices import Engine, Method
from core.planning import activations as act
from core.planning import states
from core.planning.setup import Setup
from core.planning.states import Term
from core.tasks import TaskType

#: Reserved whatever happens; the rest comes and goes and fragments.
_STILL = frozenset(
    (
        "weights",
        "frozen parts",
        "fp32 embeddings",
        "adapter",
        "reference",
        "optimizer",
        "average",
        "vllm",
        "cuda",
    )
)


def memory_of(setup: Setup, budget_bytes: int) -> MemoryBreakdown:
    """Term by term, at the worst moment; the totals of the others beside it."""
    totals = {phase: _whole(terms) for phase, terms in moments(setup)}
    worst = max(totals, key=lambda phase: sum(term.bytes for term in totals[phase]))
    terms = [term for term in totals[worst] if term.bytes >= 1]
    others = [(phase, sum(t.bytes for t in found)) for phase, found in totals.items() if phase != worst]
    return MemoryBreakdown(
        phase=worst,
        terms=tuple(MemoryTerm(name=term.name, bytes=round(term.bytes), why=term.text()) for term in terms),
        budget_bytes=budget_bytes,
        capacity_bytes=setup.kind.memory_bytes,
        other_peaks=tuple(MemoryPeak(phase=phase, bytes=round(size)) for phase, size in others),
    )


def peak_bytes(setup: Setup) -> float:
    """Only the number."""
    return max(_total(terms) for _, terms in moments(setup))


def fits(setup: Setup, budget: float) -> bool:
    """For the search: the first moment that is over ends it."""
    return all(_total(terms) <= budget for _, terms in moments(setup))


def evaluation_fits(setup: Setup, budget: float) -> bool:
    return _total(_evaluation(setup, _held(setup))) <= budget


def moments(setup: Setup) -> Iterator[tuple[str, list[Term]]]:
    """Each moment's terms, without fragmentation."""
    held = _held(setup)
    kept, gathered, gradients = act.kept(setup), states.gathered(setup), states.gradients(setup)
    waiting = [gradients] if setup.accumulation > 1 else []
    buckets, cast = states.ddp_buckets(setup), act.cast_adapter(setup)
    passing = [*held, *waiting, buckets, gathered, kept, cast]
    if setup.sharded:
        yield "gathering", [*held, *waiting, states.gathering(setup)]
    yield "forward", [*passing, act.passing(setup)]
    yield "loss", [*passing, act.logits(setup, backward=False)]
    yield "backward of the loss", [*passing, act.logits(setup, backward=True), act.head_gradient(setup)]
    yield "backward, first layer", [*passing, act.recomputed(setup), act.head_gradient(setup)]
    yield "backward, last layer", [*held, buckets, gradients, gathered, *_last_layer(setup)]
    yield "optimizer step", [*held, buckets, gradients, states.optimizer_temporaries(setup)]
    yield "evaluation", _evaluation(setup, held)
    if setup.task is TaskType.GRPO and not setup.vllm_share:
        work = [states.gathered_to_generate(setup), act.kv_cache(setup), act.generation_work(setup)]
        yield "generation", [*held, buckets, *work]
    if setup.picture is not None:
        # sd-scripts keeps the backbone in host memory until the latents are there.
        beside = held if setup.engine is Engine.AI_TOOLKIT else [states.cuda(setup)]
        yield "latents", [*beside, act.latent_work(setup)]


def _held(s: Setup) -> list[Term]:
    """From the first step to the last."""
    found = [states.weights(s), states.cuda(s), states.optimizer_states(s)]
    if s.picture is not None:
        found.append(states.frozen_parts(s))
    if s.full:
        found += [states.fp32_tables(s), states.reference(s)]
    else:
        found.append(states.adapter(s))
    if s.method is Method.QLORA:
        found.append(states.dequantised(s))
    if s.ema:
        found.append(states.average(s))
    if s.vllm_share:
        found.append(states.vllm(s))
    if s.compile_mode is not None:
        found.append(states.compiled(s))
    return found


def _last_layer(s: Setup) -> list[Term]:
    """The first layer of the model is the last of the backward pass: only it is still at work."""
    outside = 8.0 * s.shape.hidden * (0 if s.picture else s.tokens)
    layer = act.recomputed(s)
    again = 0.0 if s.checkpointing or s.picture else s.tokens * act.layer_bytes(s)
    # The embedding's gradient is made whole and then added to what is there: the head's, or earlier passes'.
    adds = s.full and (s.accumulation > 1 or s.shape.root == s.shape.table)
    table = 2.0 * s.shape.table if adds else 0.0
    return [Term(layer.name, layer.bytes + again + outside + table, layer.why)]


def _evaluation(s: Setup, held: list[Term]) -> list[Term]:
    return [*held, states.ddp_buckets(s), states.gathered(s), act.evaluation_logits(s)]


def _total(terms: list[Term]) -> float:
    total = still = 0.0
    for name, size, _ in terms:
        total += size
        if name in _STILL:
            still += size
    return total + states.FRAGMENTATION * (total - still)


def _whole(terms: list[Term]) -> list[Term]:
    """With what the allocator loses between blocks."""
    return [*terms, states.fragmentation(sum(term.bytes for term in terms if term.name not in _STILL))]
