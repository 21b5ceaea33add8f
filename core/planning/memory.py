"""GPU memory of one rank: the terms of every moment of a training, and the worst of them.

A step has few moments that can be the worst: a layer in the forward pass, the loss, the first layer of the
backward pass (all that was kept is still there), the last one (all gradients are there), the optimizer's
step; beside the step, evaluation, GRPO's generation and the encoding of pictures. Which of them wins changes
with rank, depth, length and vocabulary, so all are computed and the largest counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from core.budget import MemoryBreakdown, MemoryPeak, MemoryTerm
from core.choices import Engine, Method
from core.planning import activations as act
from core.planning import states
from core.planning.setup import Setup
from core.planning.states import Part, Term
from core.tasks import TaskType

#: Reserved whatever happens; the rest comes and goes and fragments.
_STILL = (
    states.weights,
    states.frozen_parts,
    states.fp32_tables,
    states.adapter,
    states.reference,
    states.optimizer_states,
    states.average,
    states.vllm,
    states.cuda,
)
_STILL_NAMES = frozenset(states.WORDS[part][0] for part in _STILL)
#: What comes and goes, with what the allocator loses between blocks.
_WITH_LOST = 1 + states.FRAGMENTATION
#: Bytes of each, by what counts them.
Parts = dict[Part, float]


class Held(NamedTuple):
    """What lies there from the first step to the last, and its bytes with what is lost between them."""

    parts: Parts
    total: float


class Trained(NamedTuple):
    """What comes and goes with the parameters that are trained, however large a batch is."""

    gathered: float
    gradients: float
    buckets: float
    #: Autocast's copies.
    cast: float
    head: float
    #: Of the optimizer's step.
    work: float


class Moment(NamedTuple):
    setup: Setup
    phase: str
    held: Held
    #: What comes and goes beside it.
    passing: Parts

    @property
    def terms(self) -> list[Term]:
        """Without fragmentation."""
        parts = (*self.held.parts.items(), *self.passing.items())
        return [states.term(part, size, self.setup) for part, size in parts]


def memory_of(setup: Setup, budget_bytes: int) -> MemoryBreakdown:
    """Term by term, at the worst moment; the totals of the others beside it."""
    totals = {one.phase: _whole(one) for one in moments(setup)}
    worst = max(totals, key=lambda phase: sum(term.bytes for term in totals[phase]))
    terms = [term for term in totals[worst] if term.bytes >= 1]
    others = [(phase, sum(t.bytes for t in found)) for phase, found in totals.items() if phase != worst]
    return MemoryBreakdown(
        phase=worst,
        terms=tuple(MemoryTerm(name=term.name, bytes=round(term.bytes), why=term.why) for term in terms),
        budget_bytes=budget_bytes,
        capacity_bytes=setup.kind.memory_bytes,
        other_peaks=tuple(MemoryPeak(phase=phase, bytes=round(size)) for phase, size in others),
    )


def peak_bytes(s: Setup) -> float:
    """Only the number: the worst of `moments`."""
    moving = max(_most_trained(s), sum(_generation(s).values()))
    peak = _held(s).total + _WITH_LOST * moving
    if s.picture is not None:
        peak = max(peak, _beside_latents(s).total + _WITH_LOST * act.latent_work(s))
    return peak


def fits(setup: Setup, budget: float) -> bool:
    """For the search: what is held all the time ends it at once where it is over already."""
    return _held(setup).total <= budget and peak_bytes(setup) <= budget


def evaluation_fits(s: Setup, budget: float) -> bool:
    return _held(s).total + _WITH_LOST * sum(_evaluation(s).values()) <= budget


def generation_fits(s: Setup, budget: float) -> bool:
    return _held(s).total + _WITH_LOST * sum(_generation(s).values()) <= budget


def _most_trained(s: Setup) -> float:
    """What comes and goes at the worst moment of training and evaluating."""
    gathered, gradients, buckets, cast, head, work = _trained(s)
    waiting = gradients if s.accumulation > 1 else 0.0
    passing = waiting + buckets + gathered + act.kept(s) + cast
    recomputed = act.recomputed(s)
    return max(
        waiting + states.gathering(s) if s.sharded else 0.0,
        passing + max(act.passing(s), act.logits(s), head + max(act.logits_backward(s), recomputed)),
        buckets + gradients + max(gathered + _last_layer(s, recomputed), work),
        buckets + gathered + act.evaluation_logits(s),
    )


def moments(s: Setup) -> Iterator[Moment]:
    """The parts of each moment, by name."""
    held, trained = _held(s), _trained(s)
    gathered, gradients, buckets, cast, head, work = trained
    waiting = {states.gradients: gradients if s.accumulation > 1 else 0.0}
    if s.sharded:
        yield Moment(s, "gathering", held, {**waiting, states.gathering: states.gathering(s)})
    passing = {
        **waiting,
        states.ddp_buckets: buckets,
        states.gathered: gathered,
        act.kept: act.kept(s),
        act.cast_adapter: cast,
    }
    backward = {**passing, act.head_gradient: head}
    recomputed = act.recomputed(s)
    yield Moment(s, "forward", held, {**passing, act.passing: act.passing(s)})
    yield Moment(s, "loss", held, {**passing, act.logits: act.logits(s)})
    yield Moment(s, "backward of the loss", held, {**backward, act.logits_backward: act.logits_backward(s)})
    yield Moment(s, "backward, first layer", held, {**backward, act.recomputed: recomputed})
    beside = {states.ddp_buckets: buckets, states.gradients: gradients}
    last = {states.gathered: gathered, act.recomputed: _last_layer(s, recomputed)}
    yield Moment(s, "backward, last layer", held, {**beside, **last})
    yield Moment(s, "optimizer step", held, {**beside, states.optimizer_temporaries: work})
    yield Moment(s, "evaluation", held, _evaluation(s))
    if generation := _generation(s):
        yield Moment(s, "generation", held, generation)
    if s.picture is not None:
        yield Moment(s, "latents", _beside_latents(s), {act.latent_work: act.latent_work(s)})


def _beside_latents(s: Setup) -> Held:
    """sd-scripts keeps the backbone in host memory until the latents are there."""
    return _held(s) if s.engine is Engine.AI_TOOLKIT else _holding({states.cuda: states.cuda(s)})


def _held(s: Setup) -> Held:
    """Kept by the setup: it is the same for every micro batch that a search tries."""
    if s.kept.held is None:
        s.kept.held = _holding(_parts_held(s))
    return s.kept.held


def _trained(s: Setup) -> Trained:
    """Kept by the setup, as `_held`."""
    if s.kept.trained is None:
        s.kept.trained = Trained(
            states.gathered(s),
            states.gradients(s),
            states.ddp_buckets(s),
            act.cast_adapter(s),
            act.head_gradient(s),
            states.optimizer_temporaries(s),
        )
    return s.kept.trained


def _holding(parts: Parts) -> Held:
    total = sum(parts.values())
    moving = sum([size for part, size in parts.items() if part not in _STILL])
    return Held(parts, total + states.FRAGMENTATION * moving)


def _parts_held(s: Setup) -> Parts:
    asked: list[Part] = [states.weights, states.cuda, states.optimizer_states]
    if s.picture is not None:
        asked.append(states.frozen_parts)
    if s.full:
        asked += (states.fp32_tables, states.reference)
    else:
        asked.append(states.adapter)
    if s.method is Method.QLORA:
        asked.append(states.dequantised)
    if s.averages:
        asked.append(states.average)
    if s.vllm_share:
        asked.append(states.vllm)
    if s.compile_mode is not None:
        asked.append(states.compiled)
    return {part: part(s) for part in asked}


def _last_layer(s: Setup, layer: float) -> float:
    """The first layer of the model is the last of the backward pass: only it is still at work."""
    outside = 8.0 * s.shape.hidden * (0 if s.picture else s.tokens)
    again = 0.0 if s.checkpointing or s.picture else s.tokens * act.layer_bytes(s)
    # The embedding's gradient is made whole and then added to what is there: the head's, or earlier passes'.
    adds = s.full and (s.accumulation > 1 or s.shape.root == s.shape.table)
    table = 2.0 * s.shape.table if adds else 0.0
    return layer + again + outside + table


def _evaluation(s: Setup) -> Parts:
    trained = _trained(s)
    return {
        states.ddp_buckets: trained.buckets,
        states.gathered: trained.gathered,
        act.evaluation_logits: act.evaluation_logits(s),
    }


def _generation(s: Setup) -> Parts:
    """Nothing where none is generated, or vLLM has its own share."""
    if s.task is not TaskType.GRPO or s.vllm_share:
        return {}
    parts = (states.gathered_to_generate, act.kv_cache, act.generation_work)
    return {states.ddp_buckets: _trained(s).buckets, **{part: part(s) for part in parts}}


def _whole(moment: Moment) -> list[Term]:
    """With what the allocator loses between blocks."""
    terms = moment.terms
    return [*terms, states.fragmentation(sum(term.bytes for term in terms if term.name not in _STILL_NAMES))]
