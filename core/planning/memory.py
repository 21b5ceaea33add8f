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


class Held(NamedTuple):
    """What lies there from the first step to the last, and its bytes with what is lost between them."""

    terms: list[Term]
    total: float


class Trained(NamedTuple):
    """What comes and goes with the parameters that are trained, however large a batch is."""

    gathered: Term
    gradients: Term
    buckets: Term
    #: Autocast's copies.
    cast: Term
    head: Term
    #: Of the optimizer's step.
    work: Term


class Moment(NamedTuple):
    phase: str
    held: Held
    #: What comes and goes beside it.
    passing: list[Term]

    @property
    def terms(self) -> list[Term]:
        return [*self.held.terms, *self.passing]


def memory_of(setup: Setup, budget_bytes: int) -> MemoryBreakdown:
    """Term by term, at the worst moment; the totals of the others beside it."""
    totals = {one.phase: _whole(one) for one in moments(setup)}
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
    return max(map(_total, moments(setup)))


def fits(setup: Setup, budget: float) -> bool:
    """For the search: what is held all the time, or the first moment that is over, ends it."""
    return _held(setup).total <= budget and all(_total(one) <= budget for one in moments(setup))


def evaluation_fits(setup: Setup, budget: float) -> bool:
    return _total(Moment("evaluation", _held(setup), _evaluation(setup))) <= budget


def moments(setup: Setup) -> Iterator[Moment]:
    """Each moment's terms, without fragmentation."""
    held, trained = _held(setup), _trained(setup)
    gathered, gradients, buckets, cast, head, work = trained
    waiting = [gradients] if setup.accumulation > 1 else []
    if setup.sharded:
        yield Moment("gathering", held, [*waiting, states.gathering(setup)])
    passing = [*waiting, buckets, gathered, act.kept(setup), cast]
    recomputed = act.recomputed(setup)
    yield Moment("forward", held, [*passing, act.passing(setup)])
    yield Moment("loss", held, [*passing, act.logits(setup, backward=False)])
    yield Moment("backward of the loss", held, [*passing, act.logits(setup, backward=True), head])
    yield Moment("backward, first layer", held, [*passing, recomputed, head])
    last = _last_layer(setup, recomputed)
    yield Moment("backward, last layer", held, [buckets, gradients, gathered, last])
    yield Moment("optimizer step", held, [buckets, gradients, work])
    yield Moment("evaluation", held, _evaluation(setup))
    if setup.task is TaskType.GRPO and not setup.vllm_share:
        generating = [states.gathered_to_generate(setup), act.kv_cache(setup), act.generation_work(setup)]
        yield Moment("generation", held, [buckets, *generating])
    if setup.picture is not None:
        # sd-scripts keeps the backbone in host memory until the latents are there.
        beside = held if setup.engine is Engine.AI_TOOLKIT else _holding([states.cuda(setup)])
        yield Moment("latents", beside, [act.latent_work(setup)])


def _held(s: Setup) -> Held:
    """Kept by the setup: it is the same for every micro batch that a search tries."""
    if s.kept.held is None:
        s.kept.held = _holding(_terms_held(s))
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


def _holding(terms: list[Term]) -> Held:
    total = sum([term.bytes for term in terms])
    still = sum([term.bytes for term in terms if term.name in _STILL])
    return Held(terms, total + states.FRAGMENTATION * (total - still))


def _terms_held(s: Setup) -> list[Term]:
    found = [states.weights(s), states.cuda(s), states.optimizer_states(s)]
    if s.picture is not None:
        found.append(states.frozen_parts(s))
    if s.full:
        found += [states.fp32_tables(s), states.reference(s)]
    else:
        found.append(states.adapter(s))
    if s.method is Method.QLORA:
        found.append(states.dequantised(s))
    if s.averages:
        found.append(states.average(s))
    if s.vllm_share:
        found.append(states.vllm(s))
    if s.compile_mode is not None:
        found.append(states.compiled(s))
    return found


def _last_layer(s: Setup, layer: Term) -> Term:
    """The first layer of the model is the last of the backward pass: only it is still at work."""
    outside = 8.0 * s.shape.hidden * (0 if s.picture else s.tokens)
    again = 0.0 if s.checkpointing or s.picture else s.tokens * act.layer_bytes(s)
    # The embedding's gradient is made whole and then added to what is there: the head's, or earlier passes'.
    adds = s.full and (s.accumulation > 1 or s.shape.root == s.shape.table)
    table = 2.0 * s.shape.table if adds else 0.0
    return Term(layer.name, layer.bytes + again + outside + table, layer.why)


def _evaluation(s: Setup) -> list[Term]:
    trained = _trained(s)
    return [trained.buckets, trained.gathered, act.evaluation_logits(s)]


def _total(moment: Moment) -> float:
    passing = 0.0
    for term in moment.passing:
        passing += term.bytes
    return moment.held.total + (1 + states.FRAGMENTATION) * passing


def _whole(moment: Moment) -> list[Term]:
    """With what the allocator loses between blocks."""
    terms = moment.terms
    return [*terms, states.fragmentation(sum(term.bytes for term in terms if term.name not in _STILL))]
