"""After an attempt that ran out of memory: tighter bounds, one step further down, for the planner to keep to.

The steps, in order. In an evaluation: fewer rows at once. In a generation: half as many completions at once,
or half as many layers gathered for all of it, whichever costs less time for what it saves; then fewer
completions in a step. Otherwise: half the micro batch and twice the accumulation,
checkpointing. Then for all: shorter sequences (images: smaller sides), the GPUs to itself, more GPUs, a 4-bit
base. Where a rule had made the passes of a running training larger, those of the plan come first again.
The effective batch stays, except for completions. Sequences stay where the memory model says that cutting
them saves next to nothing: weights and optimizer states do not get smaller by it.

Whatever the planner changes beside a step, no later plan needs more by the memory model than what ran out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from pydantic import Field, JsonValue

from core.domain.choices import Method, Refusal
from core.domain.records import Record
from core.planning.budget import conceded
from core.planning.candidate import RunCandidate, vary
from core.planning.conditions import LearnedBounds
from core.planning.memory.peak import generation_bytes, peak_bytes
from core.planning.plan import TrainingPlan
from core.planning.planner import replan
from core.planning.search.gpu_count import node_counts
from core.planning.search.ladder import may_quantise, smaller_resolutions, with_length
from core.planning.search.requirements import largest_divisor
from core.planning.time.sequences import shorter_lengths
from core.planning.time.speed import generate_seconds

#: Sequences are not shortened below this: nearly every answer would be cut off.
SHORTEST_RETRY_LENGTH = 256
#: A step is worth an attempt when the model says it saves at least this part.
LEAST_SAVING = 0.03
#: How much less of the GPU vLLM gets at a time, and the least that is worth a try.
VLLM_LESS, VLLM_LEAST = 0.75, 0.2


class OutOfMemory(Record):
    """The known facts of the failure."""

    #: "train", "evaluation" or "generation", as the trainer's progress says.
    moment: str = "train"
    #: Sequences of a pass, where a rule had made them more than planned.
    grown_micro: int | None = Field(default=None, ge=1)
    #: Another job was on the same GPUs.
    shared_gpus: bool = False
    #: GPUs that the next attempt could have, those of this one included. None: no more than this one had.
    available: int | None = Field(default=None, ge=1)


@dataclass(frozen=True, slots=True)
class OomStep:
    """One step down: the bounds that it tightens."""

    bounds: Mapping[str, object]
    field: str
    wanted: JsonValue
    got: JsonValue


def next_after_oom(
    plan: TrainingPlan, failure: OutOfMemory, hours: float | None = None
) -> TrainingPlan | None:
    """Plan the next attempt for the hours that are left; None when there is no step left."""
    bounds = bounds_after_oom(plan, failure)
    if bounds is None:
        return None
    return replan(plan, replace(plan.conditions, learned=bounds), plan.task.hours if hours is None else hours)


def bounds_after_oom(plan: TrainingPlan, failure: OutOfMemory) -> LearnedBounds | None:
    """Tighten the plan's bounds by one step; None when there is none left."""
    steps = (_tightened(plan, step, failure) for step in _steps(plan, plan.candidate, failure))
    return next((bounds for bounds in steps if _leaves_a_plan(plan, bounds, failure)), None)


def _tightened(plan: TrainingPlan, step: OomStep, failure: OutOfMemory) -> LearnedBounds:
    candidate, learned = plan.candidate, plan.conditions.learned
    given = conceded(step.field, step.wanted, step.got, f"out of memory in {failure.moment}")
    changes: dict[str, object] = {
        "micro": candidate.micro,
        "checkpointing": candidate.checkpointing,
        "rank": candidate.rank or None,
        "optimizer": candidate.optimizer,
        "no_average": not candidate.ema,
        "memory_bytes": math.ceil(peak_bytes(candidate)),
        "steps": (*learned.steps, given),
        **step.bounds,
    }
    return learned.model_copy(update=changes)


def _leaves_a_plan(plan: TrainingPlan, bounds: LearnedBounds, failure: OutOfMemory) -> bool:
    """A step helps if rows are left, and no more memory is needed: where nothing fits, or shards cost a small
    model more than they save, the plan would be as large as the profile asks."""
    hardware = plan.conditions.hardware
    if (failure.available or 0) > hardware.gpus.count:
        gpus = hardware.gpus.model_copy(update={"count": failure.available})
        hardware = hardware.model_copy(update={"gpus": gpus})
    after = replan(plan, replace(plan.conditions, hardware=hardware, learned=bounds), plan.task.hours)
    no_larger = peak_bytes(after.candidate) <= peak_bytes(plan.candidate)
    return no_larger and after.verdict.code is not Refusal.ROWS_TOO_LONG


def _steps(plan: TrainingPlan, candidate: RunCandidate, failure: OutOfMemory) -> Iterator[OomStep]:
    """All steps that there are, in their order."""
    if failure.moment == "evaluation" and candidate.eval_micro > 1:
        half = candidate.eval_micro // 2
        yield OomStep({"eval_micro": half}, "eval_micro", candidate.eval_micro, half)
    if failure.moment == "train" and failure.grown_micro and failure.grown_micro > candidate.micro:
        yield OomStep({}, "micro_batch_size", failure.grown_micro, candidate.micro)
    smaller = (_smaller_batch(candidate), _checkpointing(candidate))
    if failure.moment == "generation" and candidate.task.generates:
        # A generation has no micro batches, and saves nothing for a backward pass.
        first = (
            _less_vllm(candidate, VLLM_LESS),
            _smaller_generation(plan, candidate),
            _fewer_completions(candidate),
        )
    elif failure.moment == "load":  # where vLLM takes its share
        first = (_less_vllm(candidate, VLLM_LESS), *smaller)
    else:
        # A vLLM that sleeps takes no less with a smaller share.
        first = (*smaller, _less_vllm(candidate, 0.0 if candidate.vllm_sleep else VLLM_LESS))
    yield from filter(None, (*first, _sharded_over_nodes(candidate), _smaller_samples(plan, candidate)))
    if failure.shared_gpus and not plan.launch.exclusive:
        yield OomStep({"exclusive": True}, "exclusive", False, True)
    more = _more_gpus(plan, candidate, failure.available or candidate.world)
    yield from filter(None, (more, _four_bit_base(candidate)))


def _saves(smaller: RunCandidate, candidate: RunCandidate) -> bool:
    return peak_bytes(smaller) <= (1 - LEAST_SAVING) * peak_bytes(candidate)


def _smaller_generation(plan: TrainingPlan, candidate: RunCandidate) -> OomStep | None:
    """The same completions from less memory, by the way that costs the least time for each byte."""
    layers, together = _fewer_gathered_layers(plan, candidate), _fewer_together(candidate)

    def cost(smaller: RunCandidate) -> float:
        saved = generation_bytes(candidate) - generation_bytes(smaller)
        return (generate_seconds(smaller) - generate_seconds(candidate)) / max(saved, 1.0)

    if together is None or (layers is not None and cost(layers) <= cost(together)):
        if layers is None:
            return None
        fewer = layers.gathered_layers
        return OomStep({"gathered_layers": fewer}, "grpo.whole_layers", candidate.gathered_layers, fewer)
    return OomStep({"together": together.together}, "grpo.together", candidate.at_once, together.together)


def _fewer_gathered_layers(plan: TrainingPlan, candidate: RunCandidate) -> RunCandidate | None:
    """The gathered layers did not leave enough for the generation: half of them, then none."""
    if not (candidate.gathered_layers and candidate.reshard):
        return None
    half = vary(candidate, gathered_layers=candidate.gathered_layers // 2)
    gave_up = plan.conditions.learned.gathered_layers is not None
    return half if not gave_up and _saves(half, candidate) else vary(candidate, gathered_layers=0)


def _fewer_together(candidate: RunCandidate) -> RunCandidate | None:
    """The same completions, fewer of them at a time."""
    each, now = candidate.generations, candidate.at_once
    if candidate.vllm_share or now <= each:
        return None
    return vary(candidate, together=max(now // 2 // each, 1) * each)


def _less_vllm(candidate: RunCandidate, factor: float) -> OomStep | None:
    """A smaller share of the GPU, at last none."""
    share = candidate.vllm_share
    if not share:
        return None
    less = round(factor * share, 2)
    less = less if less >= VLLM_LEAST else 0.0
    return OomStep({"vllm_share": less}, "grpo.vllm_memory_share", share, less)


def _smaller_batch(candidate: RunCandidate) -> OomStep | None:
    if candidate.micro == 1:
        return None
    micro = largest_divisor(candidate.per_gpu, candidate.micro // 2)
    return OomStep({"micro": micro}, "micro_batch_size", candidate.micro, micro)


def _checkpointing(candidate: RunCandidate) -> OomStep | None:
    if candidate.checkpointing:
        return None
    return OomStep({"checkpointing": True}, "gradient_checkpointing", False, True)


def _sharded_over_nodes(candidate: RunCandidate) -> OomStep | None:
    if not candidate.hybrid:
        return None
    bounds = {"over_nodes": True, "gpus": candidate.world}
    return OomStep(bounds, "fsdp.within_nodes", True, False)


def _fewer_completions(candidate: RunCandidate) -> OomStep | None:
    """GRPO generates a step's completions together, whatever the micro batch."""
    completions, least = candidate.per_gpu, candidate.generations * candidate.world
    if not candidate.task.generates or completions // 2 < least:
        return None
    half = completions // 2 // least * least * candidate.world
    return OomStep({"batch": half}, "effective_batch_size", completions * candidate.world, half)


def _smaller_samples(plan: TrainingPlan, candidate: RunCandidate) -> OomStep | None:
    """Shorter sequences or fewer pixels, if the model says that they help."""
    if (image := candidate.image) is not None:
        sides = next(smaller_resolutions(image.resolutions), None)
        if sides is None or not _saves(vary(candidate, image=replace(image, resolutions=sides)), candidate):
            return None
        return OomStep({"resolution": max(sides)}, "resolutions", list(image.resolutions), list(sides))
    choices = shorter_lengths(plan.data, candidate.length, SHORTEST_RETRY_LENGTH)
    length = next((length for length in choices if length <= 0.9 * candidate.length), None)
    if length is None or not _saves(with_length(candidate, length), candidate):
        return None
    return OomStep({"length": length}, "sequence_len", candidate.length, length)


def _more_gpus(plan: TrainingPlan, candidate: RunCandidate, most: int) -> OomStep | None:
    """Only sharding makes one GPU's part smaller, so it comes with them."""
    if candidate.nodes > 1:
        return None  # whole nodes are taken already
    most = min(most, plan.profile.limits.max_gpus)
    most = min(most, candidate.node_gpus) if plan.available.nodes > 1 else most
    larger = [count for count in node_counts(most) if count > candidate.world]
    even = (count for count in larger if candidate.effective % count == 0)
    count = next(even, larger[0] if larger else None)
    if count is None or candidate.image is not None or candidate.kind.compute_capability == (0, 0):
        return None
    bounds = {"gpus": count, "sharded": True, "batch": candidate.effective}
    return OomStep(bounds, "gpus", candidate.world, count)


def _four_bit_base(candidate: RunCandidate) -> OomStep | None:
    """Last, because it changes what the adapter is trained on, a little."""
    if candidate.method is not Method.LORA or candidate.image is not None or not may_quantise(candidate):
        return None
    if candidate.sharded and candidate.task.has_pairs:
        return None  # Axolotl refuses it
    if not _saves(vary(candidate, method=Method.QLORA), candidate):
        return None
    return OomStep({"method": Method.QLORA, "rank": None}, "method", Method.LORA.value, Method.QLORA.value)
