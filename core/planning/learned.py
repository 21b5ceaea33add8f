"""What an earlier run of the same shape taught: how small it had to be, and how slow it was."""

from __future__ import annotations

from pydantic import Field

from core.facts import Record
from core.plan import TrainingPlan
from core.profile.schema import ResolvedProfile


class Learned(Record):
    """Bounds for the next plan of the same shape. Nothing learned: the profile as it is."""

    micro: int | None = Field(default=None, ge=1)
    checkpointing: bool = False
    length: int | None = Field(default=None, ge=1)
    gpus: int | None = Field(default=None, ge=1)
    #: Seconds of a step, relative to the prior.
    slowness: float = Field(default=1.0, gt=0)


def shape_key(plan: TrainingPlan) -> str:
    """Plans with the same key need the same memory: the daemon remembers what it learned under it."""
    model, adapter = plan.model, plan.adapter
    parts = (
        plan.task.task_type.value,
        model.architecture,
        f"{model.layers}x{model.hidden}",
        plan.engine.value,
        plan.method.value,
        f"r{adapter.rank}" if adapter else "full",
        plan.gpus.kind.name,
        plan.parallelism.value,
    )
    return "/".join(parts)


def learned_from(plan: TrainingPlan, prior_step_s: float | None = None) -> Learned:
    """From the plan that finally ran. `prior_step_s`: what the first plan had expected of a step."""
    slowness = 1.0
    if plan.time.measured and prior_step_s and plan.time.step_s:
        slowness = plan.time.step_s / prior_step_s
    if not plan.oom_steps:
        return Learned(slowness=slowness)
    text = "; ".join(plan.oom_steps)
    return Learned(
        micro=plan.batch.micro,
        checkpointing=plan.precision.gradient_checkpointing,
        length=plan.sequence.length if "sequence_len" in text else None,
        gpus=plan.batch.world_size if "gpus" in text else None,
        slowness=slowness,
    )


def with_learned(profile: ResolvedProfile, learned: Learned) -> ResolvedProfile:
    """The profile within the bounds; the effective batch stays, accumulation makes up for the micro batch."""
    limits, targets = profile.limits, profile.targets
    update: dict[str, object] = {}
    if learned.micro is not None:
        update["max_micro_batch"] = min(limits.max_micro_batch, learned.micro)
    if learned.length is not None:
        update["max_sequence_len"] = min(limits.max_sequence_len, learned.length)
    if learned.gpus is not None:
        update["min_gpus"] = min(max(limits.min_gpus, learned.gpus), limits.max_gpus)
    if learned.checkpointing:
        targets = targets.model_copy(update={"gradient_checkpointing": True})
    return profile.model_copy(update={"limits": limits.model_copy(update=update), "targets": targets})
