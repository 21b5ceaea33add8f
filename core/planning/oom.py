"""After an attempt that ran out of memory: the next plan, one step further down.

The steps, in order. In an evaluation: fewer rows at once. In a generation: half as many completions at once,
or half as many layers gathered for all of it, whichever costs less time for what it saves; then fewer
completions in a step. Otherwise: half the micro batch and twice the accumulation,
checkpointing. Then for all: shorter sequences (images: smaller sides), the GPUs to itself, more GPUs, a 4-bit
base. Where a rule had made the passes of a running training larger, those of the plan come first again.
The effective batch stays, except for completions. Sequences stay where the memory model says that cutting
them saves next to nothing: weights and optimizer states do not get smaller by it.

The new plan keeps the requirements and is fitted into the time that is left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import Field, JsonValue

from core.domain.choices import Method, Parallelism, Refusal
from core.domain.records import Record
from core.domain.units import show_seconds
from core.planning.assemble import batch_plan, grpo_changes
from core.planning.budget import PlanVerdict, TimelinePhase, conceded
from core.planning.candidate import RunCandidate, candidate_of, vary
from core.planning.memory.peak import generation_bytes, memory_of, peak_bytes
from core.planning.plan import FsdpPlan, SequencePlan, TrainingPlan
from core.planning.search.gpu_count import node_counts
from core.planning.search.ladder import (
    may_quantise,
    smaller_resolutions,
    with_gathered_layers,
    with_generation,
    with_length,
    with_micro,
)
from core.planning.search.requirements import SHARDABLE, largest_divisor
from core.planning.time.calibration import times_at
from core.planning.time.schedule import Cadence, most_steps, repeat_count
from core.planning.time.sequences import (
    BatchShape,
    SequenceOptions,
    Sequences,
    image_sequences,
    shorter_lengths,
    text_sequences,
)
from core.planning.time.speed import generate_seconds, step_time

#: Starting and loading again, where the plan no longer says what they take.
RESTART_S = 120.0
#: Sequences are not shortened below this: nearly every answer would be cut off.
SHORTEST_RETRY_LENGTH = 256
#: A step is worth an attempt when the model says it saves at least this part.
LEAST_SAVING = 0.03
#: How much less of the GPU vLLM gets at a time, and the least that is worth a try.
VLLM_LESS, VLLM_LEAST = 0.75, 0.2
#: The step that gives up gathering weights for a whole generation: its name in `oom_steps`.
WHOLE_LAYERS_FIELD = "grpo.whole_layers"


class OutOfMemory(Record):
    """The known facts of the failure."""

    #: "train", "evaluation" or "generation", as the trainer's progress says.
    moment: str = "train"
    #: Sequences of a pass, where a rule had made them more than planned.
    grown_micro: int | None = Field(default=None, ge=1)
    #: Since the plan was made.
    elapsed_s: float = Field(default=0.0, ge=0)
    #: Another job was on the same GPUs.
    shared_gpus: bool = False
    #: GPUs that the next attempt could have, those of this one included. None: no more than this one had.
    available: int | None = Field(default=None, ge=1)


@dataclass(frozen=True, slots=True)
class OomStep:
    """The change for the next attempt."""

    candidate: RunCandidate
    field: str
    wanted: JsonValue
    got: JsonValue
    exclusive: bool = False

    def __str__(self) -> str:
        return f"{self.field} {self.wanted} → {self.got}"


def _replanned(plan: TrainingPlan, old: RunCandidate, step: OomStep, failure: OutOfMemory) -> TrainingPlan:
    """The same requirements with the new numbers, in the time that is left."""
    new = step.candidate
    seq = _sequences(plan, new)
    step_s = plan.time.step_s * _slowdown(plan, old, new, seq)
    why = f"out of memory in {failure.moment}"
    concession = conceded(step.field, step.wanted, step.got, why)
    sharded = new.parallelism is Parallelism.FSDP
    fsdp = (plan.fsdp or FsdpPlan()).model_copy(update={"within_nodes": new.hybrid})
    return plan.model_copy(
        update={
            **_timed(plan, new, seq, step_s, failure),
            "gpus": plan.gpus.model_copy(update={"count": new.world}),
            "method": new.method,
            "parallelism": new.parallelism,
            "fsdp": fsdp if sharded else None,
            "optimizer": plan.optimizer.model_copy(update={"name": new.optimizer}),
            "batch": batch_plan(new),
            "sequence": _sequence(plan, seq),
            "precision": plan.precision.model_copy(update={"gradient_checkpointing": new.checkpointing}),
            "image": plan.image and new.image and _image(plan, new),
            "grpo": plan.grpo and plan.grpo.model_copy(update=grpo_changes(new)),
            "memory": memory_of(new, plan.memory.budget_bytes),
            "concessions": (*plan.concessions, concession),
            "oom_steps": (*plan.oom_steps, str(step)),
            "launch": plan.launch.model_copy(
                update={"processes": new.world, "exclusive": plan.launch.exclusive or step.exclusive}
            ),
        }
    )


def _image(plan: TrainingPlan, new: RunCandidate) -> object:
    assert plan.image is not None
    assert new.image is not None
    update = {"resolutions": new.image.resolutions, "vae_batch": new.image.vae_batch}
    return plan.image.model_copy(update=update)


def _sequences(plan: TrainingPlan, candidate: RunCandidate) -> Sequences:
    if plan.image is not None and candidate.image is not None:
        return image_sequences(plan.data, plan.model, candidate.image.resolution, plan.image.repeats)
    old = plan.sequence
    options = SequenceOptions(old.packing, old.group_by_length, candidate.generations, candidate.completion)
    batch = BatchShape(candidate.micro, candidate.effective, candidate.ordered_passes)
    rows = plan.data.rows - plan.steps.eval_rows
    return text_sequences(plan.data, options, candidate.length, rows, batch)


def _sequence(plan: TrainingPlan, seq: Sequences) -> SequencePlan:
    return plan.sequence.model_copy(
        update={
            "length": seq.length,
            "prompt_limit": seq.prompt_limit,
            "completion_limit": seq.completion_limit,
            "dropped_share": min(max(seq.dropped_share, 0.0), 1.0),
            "per_epoch": seq.per_epoch,
            "tokens_per_epoch": round(seq.per_epoch * (seq.length if seq.images else seq.padded)),
        }
    )


def _slowdown(plan: TrainingPlan, old: RunCandidate, new: RunCandidate, seq: Sequences) -> float:
    """Factor on the plan's step time, which may be measured."""
    before = step_time(old, _sequences(plan, old).work(old.micro)).seconds
    return step_time(new, seq.work(new.micro)).seconds / before


def _timed(
    plan: TrainingPlan, new: RunCandidate, seq: Sequences, step_s: float, failure: OutOfMemory
) -> dict[str, object]:
    """Steps, time and verdict. The download is done; starting, loading and the rest come again."""
    steps, time = plan.steps, plan.time
    names = [phase.name for phase in time.phases]
    at = names.index("train") if "train" in names else 0
    opening = [phase for phase in time.phases[:at] if phase.name not in ("download", "so far")]
    opening = opening or [TimelinePhase(name="start", seconds=RESTART_S, why="starting and loading again")]
    choosing = tuple(phase for phase in time.phases[:-1] if phase.name == "choose")
    tail = (*choosing, *time.phases[-1:])
    spent = failure.elapsed_s + sum(phase.seconds for phase in (*opening, *tail))
    slower = step_s / time.step_s if time.step_s else 1.0
    rate = times_at(plan, step_s)
    per_epoch = max(-(-seq.per_epoch // new.effective), 1)
    epochs = (steps.wanted or steps.total) / max(steps.per_epoch, 1)
    wanted = max(round(epochs * per_epoch), 1)
    cadence = Cadence(steps.eval_every, steps.save_every, 1, 1, rate.eval_s)
    total = most_steps(wanted, rate, cadence, time.deadline_s - time.reserve_s - spent)
    phases = [
        TimelinePhase(name="so far", seconds=failure.elapsed_s, why="attempts that ran out of memory"),
        *opening,
        TimelinePhase(name="train", seconds=total * step_s, why=f"{total:,} steps of {step_s:.3g} s"),
        TimelinePhase(
            name="evaluate",
            seconds=(repeat_count(total, steps.eval_every) + 1) * rate.eval_s if total else 0.0,
        ),
        TimelinePhase(name="save", seconds=repeat_count(total, steps.save_every) * rate.save_s),
        *tail,
    ]
    verdict = plan.verdict
    if total < 1:
        why = f"{show_seconds(time.deadline_s - time.reserve_s - spent)} are left after the attempts before"
        verdict = PlanVerdict(feasible=False, code=Refusal.NO_TIME, reason=why)
    update = {"total": total, "wanted": wanted, "per_epoch": per_epoch, "epochs": total / per_epoch}
    return {
        "steps": steps.model_copy(update=update),
        "time": time.model_copy(
            update={
                "phases": tuple(phases),
                "step_s": step_s,
                "throughput": new.effective * seq.trained / step_s,
                "utilisation": min(time.utilisation / slower, 1.0),
            }
        ),
        "verdict": verdict,
    }


def next_after_oom(plan: TrainingPlan, failure: OutOfMemory) -> TrainingPlan | None:
    """The plan of the next attempt; None when there is no step left."""
    candidate = candidate_of(plan)
    step = _next_step(plan, candidate, failure)
    return _replanned(plan, candidate, step, failure) if step else None


def without_vllm(plan: TrainingPlan) -> TrainingPlan:
    """The same training whose engine generates itself, with the memory and the time that this takes."""
    old = candidate_of(plan)
    own = with_generation(vary(old, vllm_share=0.0), plan.memory.budget_bytes)
    step = OomStep(own, "grpo_vllm", True, False)
    refitted = _replanned(plan, old, step, OutOfMemory(moment="generation"))
    if not refitted.verdict.feasible:  # an estimate: the clock ends the training
        grpo = plan.grpo and plan.grpo.model_copy(update=grpo_changes(own))
        return plan.model_copy(update={"grpo": grpo})
    return refitted.model_copy(update={"concessions": plan.concessions, "oom_steps": plan.oom_steps})


def _next_step(plan: TrainingPlan, candidate: RunCandidate, failure: OutOfMemory) -> OomStep | None:
    if failure.moment == "evaluation" and candidate.eval_micro > 1:
        half = candidate.eval_micro // 2
        return OomStep(vary(candidate, eval_micro=half), "eval_micro", candidate.eval_micro, half)
    if failure.moment == "train" and failure.grown_micro and failure.grown_micro > candidate.micro:
        return OomStep(candidate, "micro_batch_size", failure.grown_micro, candidate.micro)
    if failure.moment == "generation":
        # A generation has no micro batches, and saves nothing for a backward pass.
        step = (
            _less_vllm(plan, candidate, VLLM_LESS)
            or _smaller_generation(plan, candidate)
            or _fewer_completions(candidate)
        )
    elif failure.moment == "load":  # where vLLM takes its share
        less = _less_vllm(plan, candidate, VLLM_LESS)
        step = less or _smaller_batch(candidate) or _checkpointing(candidate)
    else:
        # A vLLM that sleeps takes no less with a smaller share.
        less = _less_vllm(plan, candidate, 0.0 if candidate.vllm_sleep else VLLM_LESS)
        step = _smaller_batch(candidate) or _checkpointing(candidate) or less
    step = step or _sharded_over_nodes(candidate)
    if step:
        return step
    step = _shorter(plan, candidate) if candidate.image is None else _smaller_images(candidate)
    if step and peak_bytes(step.candidate) <= (1 - LEAST_SAVING) * peak_bytes(candidate):
        return step
    if failure.shared_gpus and not plan.launch.exclusive:
        return OomStep(candidate, "exclusive", False, True, exclusive=True)
    return _more_gpus(plan, candidate, failure.available or candidate.world) or _four_bit_base(candidate)


def _smaller_generation(plan: TrainingPlan, candidate: RunCandidate) -> OomStep | None:
    """The same completions from less memory, by the way that costs the least time for each byte."""
    steps = [step for step in (_fewer_gathered_layers(plan, candidate), _fewer_together(candidate)) if step]

    def cost(step: OomStep) -> float:
        saved = generation_bytes(candidate) - generation_bytes(step.candidate)
        return (generate_seconds(step.candidate) - generate_seconds(candidate)) / max(saved, 1.0)

    return min(steps, key=cost, default=None)


def _fewer_gathered_layers(plan: TrainingPlan, candidate: RunCandidate) -> OomStep | None:
    """The gathered layers did not leave enough for the generation: half of them, then none."""
    if not (candidate.gathered_layers and candidate.reshard):
        return None
    half = vary(candidate, gathered_layers=candidate.gathered_layers // 2)
    worth = not _gave_up_layers(plan) and peak_bytes(half) <= (1 - LEAST_SAVING) * peak_bytes(candidate)
    fewer = half if worth else vary(candidate, gathered_layers=0)
    return OomStep(fewer, WHOLE_LAYERS_FIELD, candidate.gathered_layers, fewer.gathered_layers)


def _less_vllm(plan: TrainingPlan, candidate: RunCandidate, factor: float) -> OomStep | None:
    """A smaller share of the GPU, at last none."""
    share = candidate.vllm_share
    if not share:
        return None
    less = round(factor * share, 2)
    less = less if less >= VLLM_LEAST else 0.0
    smaller = with_generation(vary(candidate, vllm_share=less), plan.memory.budget_bytes)
    return OomStep(smaller, "grpo.vllm_memory_share", share, less)


def _fewer_together(candidate: RunCandidate) -> OomStep | None:
    """The same completions, fewer of them at a time."""
    each, now = candidate.generations, candidate.at_once
    if candidate.vllm_share or now <= each:
        return None
    half = max(now // 2 // each, 1) * each
    return OomStep(vary(candidate, together=half), "grpo.together", now, half)


def _gave_up_layers(plan: TrainingPlan) -> bool:
    return any(step.startswith(WHOLE_LAYERS_FIELD) for step in plan.oom_steps)


def _smaller_batch(candidate: RunCandidate) -> OomStep | None:
    if candidate.micro == 1:
        return None
    micro = largest_divisor(candidate.per_gpu, candidate.micro // 2)
    smaller = vary(with_micro(candidate, micro), eval_micro=min(candidate.eval_micro, micro))
    return OomStep(smaller, "micro_batch_size", candidate.micro, micro)


def _checkpointing(candidate: RunCandidate) -> OomStep | None:
    if candidate.checkpointing:
        return None
    return OomStep(vary(candidate, checkpointing=True), "gradient_checkpointing", False, True)


def _sharded_over_nodes(candidate: RunCandidate) -> OomStep | None:
    if not candidate.hybrid:
        return None
    return OomStep(vary(candidate, hybrid=False), "fsdp.within_nodes", True, False)


def _fewer_completions(candidate: RunCandidate) -> OomStep | None:
    """GRPO generates a step's completions together, whatever the micro batch."""
    completions, least = candidate.per_gpu, candidate.generations * candidate.world
    if not candidate.task.generates or completions // 2 < least:
        return None
    half = completions // 2 // least * least
    micro = largest_divisor(half, candidate.micro)
    smaller = vary(candidate, micro=micro, accumulation=half // micro)
    return OomStep(smaller, "effective_batch_size", completions * candidate.world, half * candidate.world)


def _shorter(plan: TrainingPlan, candidate: RunCandidate) -> OomStep | None:
    choices = shorter_lengths(plan.data, candidate.length, SHORTEST_RETRY_LENGTH)
    worth = [length for length in choices if length <= 0.9 * candidate.length]
    if not worth:
        return None
    return OomStep(with_length(candidate, worth[0]), "sequence_len", candidate.length, worth[0])


def _smaller_images(candidate: RunCandidate) -> OomStep | None:
    assert candidate.image is not None
    now = candidate.image
    smaller = next(smaller_resolutions(now.resolutions), None)
    if smaller is None:
        return None
    image = replace(now, resolutions=smaller, vae_batch=min(now.vae_batch, 4))
    return OomStep(vary(candidate, image=image), "resolutions", list(now.resolutions), list(smaller))


def _more_gpus(plan: TrainingPlan, candidate: RunCandidate, most: int) -> OomStep | None:
    """Only sharding makes one GPU's part smaller, so it comes with them."""
    if candidate.nodes > 1:
        return None  # whole nodes are taken already
    most = min(most, candidate.node_gpus) if plan.available.nodes > 1 else most
    effective = candidate.effective
    larger = [count for count in node_counts(most) if count > candidate.world]
    count = next((count for count in larger if effective % count == 0), larger[0] if larger else None)
    if count is None or candidate.image is not None or candidate.kind.compute_capability == (0, 0):
        return None
    per_gpu = max(round(effective / count), 1)
    if candidate.task.generates:
        per_gpu = max(-(-per_gpu // candidate.generations), count) * candidate.generations
    micro = largest_divisor(per_gpu, candidate.micro)
    wider = vary(
        candidate,
        world=count,
        parallelism=Parallelism.FSDP,
        optimizer=SHARDABLE.get(candidate.optimizer, candidate.optimizer),
        micro=micro,
        accumulation=per_gpu // micro,
        gathered_layers=0,
    )
    if not _gave_up_layers(plan):
        wider = with_gathered_layers(wider, plan.memory.budget_bytes)
    return OomStep(wider, "gpus", candidate.world, count)


def _four_bit_base(candidate: RunCandidate) -> OomStep | None:
    """Last, because it changes what the adapter is trained on, a little."""
    if candidate.method is not Method.LORA or candidate.image is not None or not may_quantise(candidate):
        return None
    if candidate.sharded and candidate.task.has_pairs:
        return None  # Axolotl refuses it
    smaller = vary(candidate, method=Method.QLORA)
    if peak_bytes(smaller) > (1 - LEAST_SAVING) * peak_bytes(candidate):
        return None
    return OomStep(smaller, "method", Method.LORA.value, Method.QLORA.value)
