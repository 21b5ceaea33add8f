"""After an attempt that ran out of memory: the next plan, one rung down.

The rungs, in order. In an evaluation: fewer rows at once. While it generates: half as many layers gathered at
once, none, then fewer completions in a step. Otherwise: half the micro batch and twice the accumulation,
checkpointing. For all: shorter sequences (pictures: fewer pixels), the GPUs for itself alone, more GPUs. The
effective batch is kept but for the completions. Sequences are left alone where the memory model says that
cutting them saves next to nothing: weights and optimizer states do not get smaller by it.
"""

from __future__ import annotations

from dataclasses import replace

from core.choices import Parallelism
from core.plan import TrainingPlan
from core.planning.gpus import COUNTS
from core.planning.ladder import RESOLUTIONS, keeping_layers, with_length, with_micro
from core.planning.memory import peak_bytes
from core.planning.replan import OutOfMemory, Rung, replanned
from core.planning.sequences import shorter_lengths
from core.planning.setup import Setup, setup_of, vary
from core.planning.start import SHARDABLE, largest_divisor
from core.tasks import TaskType

#: Sequences are not shortened below this: nearly every answer would be cut off.
SHORTEST = 256
#: A rung is worth an attempt when the model says it saves at least this part.
WORTH = 0.03
#: The rung that gives up gathering weights for a whole generation: its name in `oom_steps`.
WHOLE = "grpo.whole_layers"


def next_after_oom(plan: TrainingPlan, failure: OutOfMemory) -> TrainingPlan | None:
    """The plan of the next attempt; None when there is no rung left."""
    setup = setup_of(plan)
    rung = _next(plan, setup, failure)
    return replanned(plan, setup, rung, failure) if rung else None


def _next(plan: TrainingPlan, setup: Setup, failure: OutOfMemory) -> Rung | None:
    if failure.moment == "evaluation" and setup.eval_micro > 1:
        half = setup.eval_micro // 2
        return Rung(vary(setup, eval_micro=half), "eval_micro", setup.eval_micro, half)
    # What is generated knows nothing of micro batches, and keeps nothing for a backward pass.
    generating = (_layer_by_layer, _fewer_completions)
    for step in generating if failure.moment == "generation" else (_smaller_batch, _checkpointing):
        if rung := step(plan, setup, failure):
            return rung
    for step in (_shorter, _smaller_pictures):
        rung = step(plan, setup, failure)
        if rung and peak_bytes(rung.setup) <= (1 - WORTH) * peak_bytes(setup):
            return rung
    if failure.neighbours and not plan.launch.exclusive:
        return Rung(setup, "exclusive", False, True, exclusive=True)
    return _more_gpus(plan, setup, failure)


def _layer_by_layer(plan: TrainingPlan, setup: Setup, failure: OutOfMemory) -> Rung | None:
    """What was gathered did not leave enough for what is generated: half of it, then nothing."""
    if not (setup.whole and setup.reshard):
        return None
    half = vary(setup, whole=setup.whole // 2)
    worth = not _gave_up_layers(plan) and peak_bytes(half) <= (1 - WORTH) * peak_bytes(setup)
    fewer = half if worth else vary(setup, whole=0)
    return Rung(fewer, WHOLE, setup.whole, fewer.whole)


def _gave_up_layers(plan: TrainingPlan) -> bool:
    return any(step.startswith(WHOLE) for step in plan.oom_steps)


def _smaller_batch(plan: TrainingPlan, setup: Setup, failure: OutOfMemory) -> Rung | None:
    if setup.micro == 1:
        return None
    micro = largest_divisor(setup.micro * setup.accumulation, setup.micro // 2)
    smaller = vary(with_micro(setup, micro), eval_micro=min(setup.eval_micro, micro))
    return Rung(smaller, "micro_batch_size", setup.micro, micro)


def _checkpointing(plan: TrainingPlan, setup: Setup, failure: OutOfMemory) -> Rung | None:
    if setup.checkpointing:
        return None
    return Rung(vary(setup, checkpointing=True), "gradient_checkpointing", False, True)


def _fewer_completions(plan: TrainingPlan, setup: Setup, failure: OutOfMemory) -> Rung | None:
    """GRPO generates a step's completions together, whatever the micro batch."""
    together, least = setup.micro * setup.accumulation, setup.generations * setup.world
    if setup.task is not TaskType.GRPO or together // 2 < least:
        return None
    half = together // 2 // least * least
    micro = largest_divisor(half, setup.micro)
    smaller = vary(setup, micro=micro, accumulation=half // micro)
    return Rung(smaller, "effective_batch_size", together * setup.world, half * setup.world)


def _shorter(plan: TrainingPlan, setup: Setup, failure: OutOfMemory) -> Rung | None:
    if setup.picture is not None:
        return None
    choices = shorter_lengths(plan.data, setup.length, SHORTEST)
    worth = [length for length in choices if length <= 0.9 * setup.length]
    if not worth:
        return None
    return Rung(with_length(setup, worth[0]), "sequence_len", setup.length, worth[0])


def _smaller_pictures(plan: TrainingPlan, setup: Setup, failure: OutOfMemory) -> Rung | None:
    if setup.picture is None:
        return None
    now = setup.picture.resolution
    smaller = next((one for one in RESOLUTIONS if one < now), None)
    if smaller is None:
        return None
    picture = replace(setup.picture, resolution=smaller, vae_batch=min(setup.picture.vae_batch, 4))
    return Rung(vary(setup, picture=picture), "resolution", now, smaller)


def _more_gpus(plan: TrainingPlan, setup: Setup, failure: OutOfMemory) -> Rung | None:
    """Only sharding makes one GPU's part smaller, so it comes with them."""
    most = failure.available or setup.world
    effective = setup.micro * setup.accumulation * setup.world
    larger = [one for one in COUNTS if setup.world < one <= most]
    count = next((one for one in larger if effective % one == 0), larger[0] if larger else None)
    if count is None or setup.picture is not None or setup.kind.compute_capability == (0, 0):
        return None
    per_gpu = max(round(effective / count), 1)
    if setup.task is TaskType.GRPO:
        per_gpu = max(-(-per_gpu // setup.generations), count) * setup.generations
    micro = largest_divisor(per_gpu, setup.micro)
    wider = vary(
        setup,
        world=count,
        parallelism=Parallelism.FSDP,
        optimizer=SHARDABLE.get(setup.optimizer, setup.optimizer),
        micro=micro,
        accumulation=per_gpu // micro,
        whole=0,
    )
    if not _gave_up_layers(plan):
        wider = keeping_layers(wider, plan.memory.budget_bytes)
    return Rung(wider, "gpus", setup.world, count)


__all__ = ["OutOfMemory", "Rung", "next_after_oom"]
