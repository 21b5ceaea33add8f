"""How fast a plan expects its run to be, and what share of that a run reaches.

    efficiency = measured speed / expected speed = MFU of the run / MFU that the plan expected

The expectation is that of the plan as it was launched: what is measured later corrects the schedule, never
this. It counts tokens as the trainer's meter does, or padding would look like speed: our own trainer leaves
padding out, Axolotl works it through and counts it. Images have no tokens, and a step on rewards spends its
time generating: there samples per second are compared.
"""

from __future__ import annotations

from typing import NamedTuple

from core.domain.choices import Engine
from core.planning.candidate import candidate_of
from core.planning.plan import TrainingPlan
from core.planning.time.speed import image_flops, training_flops


class ExpectedSpeed(NamedTuple):
    """Of all GPUs together. None: not counted for this kind of task."""

    step_s: float
    samples_s: float
    tokens_s: float | None
    mfu: float | None

    def efficiency(self, tokens_s: float | None, samples_s: float | None) -> float | None:
        """The measured speed relative to this one; above 1 where the plan was too careful."""
        measured, expected = (
            (samples_s, self.samples_s) if self.tokens_s is None else (tokens_s, self.tokens_s)
        )
        return measured / expected if measured is not None and expected else None


def expected_speed(plan: TrainingPlan) -> ExpectedSpeed | None:
    """None for a plan that could not estimate its steps."""
    step_s, task = plan.time.step_s, plan.task.task_type
    if step_s <= 0:
        return None
    samples_s = plan.batch.effective / step_s
    tokens_s = _tokens_s(plan, samples_s) if task.is_text and not task.generates else None
    return ExpectedSpeed(step_s, samples_s, tokens_s, flops_utilisation(plan, tokens_s, samples_s))


def flops_utilisation(plan: TrainingPlan, tokens_s: float | None, samples_s: float | None) -> float | None:
    """MFU: the share of the GPUs' peak that the model's own arithmetic takes at this speed."""
    rate, peak = tokens_s if plan.task.task_type.is_text else samples_s, peak_speed(plan)
    return None if rate is None or peak is None else min(rate / peak, 1.0)


def peak_speed(plan: TrainingPlan) -> float | None:
    """Tokens per second, of pictures samples, at an MFU of 1. None on a CPU, whose peak is made up, and for
    rewards, where a step spends its time generating."""
    if plan.gpus.is_cpu or plan.task.task_type.generates:
        return None
    candidate = candidate_of(plan)
    if candidate.image is not None:
        flops = image_flops(candidate)
    else:
        flops = training_flops(candidate, min(plan.data.total.mean, plan.sequence.length))
    return plan.gpus.kind.bf16_flops * plan.batch.world_size / flops


def _tokens_s(plan: TrainingPlan, samples_s: float) -> float:
    if plan.engine is Engine.NATIVE:
        return plan.time.throughput
    return plan.sequence.tokens_per_epoch / max(plan.sequence.per_epoch, 1) * samples_s
