"""GPU memory of one rank: the terms of every moment of a training, and the worst of them.

A step has few moments that can be the worst: a layer in the forward pass, the loss, the first layer of the
backward pass (everything saved is still there), the last one (all gradients are there), the optimizer's
step; beside the step, evaluation, GRPO's generation and the encoding of images. Which of them wins changes
with rank, depth, length and vocabulary, so all are computed and the largest counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from core.domain.choices import Engine, Method
from core.planning.budget import MemoryBreakdown, MemoryPeak, MemoryTerm
from core.planning.candidate import BytesByPart, HeldMemory, MemoryPart, RunCandidate, TrainedMemory
from core.planning.memory import activations as act
from core.planning.memory import persistent
from core.planning.memory.persistent import DescribedBytes

#: Allocated once; the rest comes and goes and fragments.
_CONSTANT = (
    persistent.weights,
    persistent.frozen_parts,
    persistent.fp32_tables,
    persistent.adapter,
    persistent.reference,
    persistent.optimizer_states,
    persistent.average,
    persistent.twin,
    persistent.vllm,
    persistent.cuda,
    persistent.measured_more,
)
_CONSTANT_NAMES = frozenset(persistent.PART_TEXTS[part][0] for part in _CONSTANT)
#: The factor on what comes and goes for what the allocator loses between blocks.
_FRAGMENTED = 1 + persistent.FRAGMENTATION


class MemoryMoment(NamedTuple):
    candidate: RunCandidate
    phase: str
    held: HeldMemory
    #: What comes and goes beside it.
    temporary: BytesByPart

    @property
    def terms(self) -> list[DescribedBytes]:
        """Without fragmentation."""
        parts = (*self.held.parts.items(), *self.temporary.items())
        return [persistent.described_bytes(part, size, self.candidate) for part, size in parts]


def memory_of(candidate: RunCandidate, budget_bytes: int) -> MemoryBreakdown:
    """The terms of the worst moment, and the totals of the others."""
    by_phase = {moment.phase: terms_with_fragmentation(moment) for moment in moments(candidate)}
    totals = {phase: sum(term.bytes for term in terms) for phase, terms in by_phase.items()}
    worst = max(totals, key=totals.__getitem__)
    terms = [term for term in by_phase[worst] if term.bytes >= 1]
    return MemoryBreakdown(
        phase=worst,
        terms=tuple(MemoryTerm(name=term.name, bytes=round(term.bytes), why=term.why) for term in terms),
        budget_bytes=budget_bytes,
        capacity_bytes=candidate.kind.memory_bytes,
        other_peaks=tuple(
            MemoryPeak(phase=phase, bytes=round(total)) for phase, total in totals.items() if phase != worst
        ),
    )


def peak_bytes(s: RunCandidate) -> float:
    """Only the number: the worst of `moments`."""
    temporary = max(_training_peak(s), sum(_generation(s).values()))
    peak = _held(s).total + _FRAGMENTED * temporary
    if s.image is not None:
        encoding = act.latent_work(s)
        if s.engine is Engine.PICTURES:
            encoding = max(encoding, act.text_encoding(s))
        peak = max(peak, _beside_latents(s).total + _FRAGMENTED * encoding)
    return peak


def fits_memory(candidate: RunCandidate, budget: float) -> bool:
    """Decide quickly, for the search: the moments are skipped if the held memory alone is over the budget."""
    return _held(candidate).total <= budget and peak_bytes(candidate) <= budget


def evaluation_fits(s: RunCandidate, budget: float) -> bool:
    return _held(s).total + _FRAGMENTED * sum(_evaluation(s).values()) <= budget


def generation_bytes(s: RunCandidate) -> float:
    return _held(s).total + _FRAGMENTED * sum(_generation(s).values())


def generation_fits(s: RunCandidate, budget: float) -> bool:
    return generation_bytes(s) <= budget


def _training_peak(s: RunCandidate) -> float:
    """The temporary bytes of the worst moment of training and evaluating."""
    gathered, gradients, buckets, cast, head, work = _trained(s)
    accumulated = gradients if s.accumulation > 1 else 0.0
    forward = accumulated + buckets + gathered + act.saved_activations(s) + cast
    layer = act.backward_layer(s)
    return max(
        accumulated + persistent.gathering(s) if s.sharded else 0.0,
        forward + max(act.forward_layer(s), act.logits(s), head + max(act.logits_backward(s), layer)),
        buckets + gradients + max(gathered + _last_layer(s, layer), work),
        buckets + gathered + act.evaluation_logits(s),
    )


def moments(s: RunCandidate) -> Iterator[MemoryMoment]:
    """The parts of each moment, by name."""
    held, trained = _held(s), _trained(s)
    gathered, gradients, buckets, cast, head, work = trained
    accumulated = {persistent.gradients: gradients if s.accumulation > 1 else 0.0}
    if s.sharded:
        parts = {**accumulated, persistent.gathering: persistent.gathering(s)}
        yield MemoryMoment(s, "gathering", held, parts)
    forward = {
        **accumulated,
        persistent.ddp_buckets: buckets,
        persistent.gathered: gathered,
        act.saved_activations: act.saved_activations(s),
        act.cast_adapter: cast,
    }
    backward = {**forward, act.head_gradient: head}
    layer = act.backward_layer(s)
    yield MemoryMoment(s, "forward", held, {**forward, act.forward_layer: act.forward_layer(s)})
    yield MemoryMoment(s, "loss", held, {**forward, act.logits: act.logits(s)})
    parts = {**backward, act.logits_backward: act.logits_backward(s)}
    yield MemoryMoment(s, "backward of the loss", held, parts)
    yield MemoryMoment(s, "backward, first layer", held, {**backward, act.backward_layer: layer})
    all_gradients = {persistent.ddp_buckets: buckets, persistent.gradients: gradients}
    last = {persistent.gathered: gathered, act.backward_layer: _last_layer(s, layer)}
    yield MemoryMoment(s, "backward, last layer", held, {**all_gradients, **last})
    yield MemoryMoment(s, "optimizer step", held, {**all_gradients, persistent.optimizer_temporaries: work})
    yield MemoryMoment(s, "evaluation", held, _evaluation(s))
    if generation := _generation(s):
        yield MemoryMoment(s, "generation", held, generation)
    if s.image is not None:
        yield MemoryMoment(s, "latents", _beside_latents(s), {act.latent_work: act.latent_work(s)})
    if s.engine is Engine.PICTURES:
        yield MemoryMoment(s, "captions", _beside_latents(s), {act.text_encoding: act.text_encoding(s)})


def _beside_latents(s: RunCandidate) -> HeldMemory:
    """sd-scripts keeps the backbone in host memory until the latents are there, and so does the picture
    trainer."""
    if s.engine is Engine.AI_TOOLKIT:
        return _held(s)
    return _total({persistent.cuda: persistent.cuda(s)})


def _held(s: RunCandidate) -> HeldMemory:
    """Cached in the candidate: it is the same for every micro batch that a search tries."""
    if s.memory_cache.held is None:
        s.memory_cache.held = _total(_held_parts(s))
    return s.memory_cache.held


def _trained(s: RunCandidate) -> TrainedMemory:
    """Cached in the candidate, as `_held`."""
    if s.memory_cache.trained is None:
        s.memory_cache.trained = TrainedMemory(
            persistent.gathered(s),
            persistent.gradients(s),
            persistent.ddp_buckets(s),
            act.cast_adapter(s),
            act.head_gradient(s),
            persistent.optimizer_temporaries(s),
        )
    return s.memory_cache.trained


def _total(parts: BytesByPart) -> HeldMemory:
    total = sum(parts.values())
    fragmenting = sum([size for part, size in parts.items() if part not in _CONSTANT])
    return HeldMemory(parts, total + persistent.FRAGMENTATION * fragmenting)


def _held_parts(s: RunCandidate) -> BytesByPart:
    parts: list[MemoryPart] = [
        persistent.weights,
        persistent.cuda,
        persistent.measured_more,
        persistent.optimizer_states,
    ]
    if s.image is not None:
        parts += (persistent.frozen_parts, persistent.twin)
    if s.full:
        parts += (persistent.fp32_tables, persistent.reference)
    else:
        parts.append(persistent.adapter)
    if s.method is Method.QLORA:
        parts.append(persistent.dequantised)
    if s.keeps_average:
        parts.append(persistent.average)
    if s.vllm_share:
        parts.append(persistent.vllm)
    if s.compile_mode is not None:
        parts.append(persistent.compiled)
    return {part: part(s) for part in parts}


def _last_layer(s: RunCandidate, layer: float) -> float:
    """The first layer of the model is the last of the backward pass: only it is still at work."""
    outside = 8.0 * s.shape.hidden * (0 if s.image else s.tokens)
    saved = 0.0 if s.checkpointing or s.image else s.tokens * act.layer_bytes(s)
    # The embedding's gradient is computed apart, then added to what is there: the head's, or earlier passes'.
    adds = s.full and (s.accumulation > 1 or s.shape.embedding_params == s.shape.vocab_params)
    embedding_gradient = 2.0 * s.shape.vocab_params if adds else 0.0
    return layer + saved + outside + embedding_gradient


def _evaluation(s: RunCandidate) -> BytesByPart:
    trained = _trained(s)
    return {
        persistent.ddp_buckets: trained.buckets,
        persistent.gathered: trained.gathered,
        act.evaluation_logits: act.evaluation_logits(s),
    }


def _generation(s: RunCandidate) -> BytesByPart:
    """Empty when nothing is generated, or vLLM has its own share all the time."""
    if not s.task.generates:
        return {}
    if s.vllm_share:
        return {persistent.vllm_awake: persistent.vllm_awake(s)} if s.vllm_sleep else {}
    parts = (persistent.gathered_to_generate, act.kv_cache, act.generation_work)
    return {persistent.ddp_buckets: _trained(s).buckets, **{part: part(s) for part in parts}}


def terms_with_fragmentation(moment: MemoryMoment) -> list[DescribedBytes]:
    """The terms, and what the allocator loses between blocks."""
    terms = moment.terms
    fragmenting = sum(term.bytes for term in terms if term.name not in _CONSTANT_NAMES)
    return [*terms, persistent.fragmentation(fragmenting)]
