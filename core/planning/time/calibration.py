"""Replace what a plan assumed by what runs have measured.

After the first steps the measured speed replaces the prior and the schedule follows. The prior times are
in `speed.py` (seconds per step), `overheads.py` (everything beside training) and `schedule.py`.

    efficiency = measured speed / expected speed = MFU of the run / MFU that the plan expected

The expectation is that of the plan as it was launched: what is measured later corrects the schedule, never
this. It counts tokens as the trainer's meter does, or padding would look like speed: our own trainer leaves
padding out, Axolotl works it through and counts it. Images have no tokens, and a step on rewards spends its
time generating: there samples per second are compared.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pydantic import Field

from core.domain.choices import Engine
from core.domain.records import Record
from core.domain.units import show_seconds
from core.planning.budget import TimeBreakdown, TimelinePhase
from core.planning.plan import PlanReason, StepsPlan, TrainingPlan
from core.planning.time.schedule import Cadence, RepeatTimes, most_steps, repeat_count, save_interval
from core.planning.time.speed import image_flops, training_flops

#: The part of the time left that is kept free, in case steps become slower.
TIME_MARGIN = 0.03
#: Evaluations and checkpoints may take this share, or the plan's own if that is more.
OVERHEAD_SHARE = 0.1


class MeasuredRun(Record):
    """Measurements of a run so far."""

    steps_done: int = Field(ge=0)
    #: Since the plan was made.
    elapsed_s: float = Field(ge=0)
    #: One optimizer step: the 90th percentile of the last ones, without the first few and compilation.
    step_s: float = Field(gt=0)
    eval_s: float | None = Field(default=None, ge=0)
    save_s: float | None = Field(default=None, ge=0)
    #: Of all that follows the training, averaging and held-out rows included.
    publish_s: float | None = Field(default=None, ge=0)


def recalibrate(plan: TrainingPlan, measured: MeasuredRun) -> TrainingPlan:
    """Give the run as many steps as its real speed allows: fewer, or more up to those asked for."""
    tail, rate = _tail(plan, measured), _measured_times(plan, measured)
    left = plan.time.deadline_s - plan.time.reserve_s - measured.elapsed_s
    left -= sum(phase.seconds for phase in tail)
    wanted = max(plan.steps.wanted or plan.steps.total, measured.steps_done)
    cadence = _cadence(plan, rate)
    more = most_steps(wanted - measured.steps_done, rate, cadence, left * (1 - TIME_MARGIN))
    total = measured.steps_done + more
    eval_every = min(max(plan.steps.eval_every, cadence.eval_least), max(total, 1))
    save_every = save_interval(cadence, eval_every, total)
    per_epoch = max(plan.steps.per_epoch, 1)
    steps = plan.steps.model_copy(
        update={
            "total": total,
            "epochs": total / per_epoch,
            "eval_every": eval_every,
            "save_every": save_every,
        }
    )
    time = _time(plan, measured, rate, tail, steps)
    why = (
        f"{rate.step_s:.3g} s per step measured after {measured.steps_done:,} steps, "
        f"{plan.time.step_s:.3g} s planned; "
        f"{show_seconds(max(left, 0))} were left"
    )
    reasons = {**plan.reasons, "steps.total": PlanReason(text=why, source="measured")}
    return plan.model_copy(update={"steps": steps, "time": time, "reasons": reasons})


def _tail(plan: TrainingPlan, measured: MeasuredRun) -> tuple[TimelinePhase, ...]:
    """Return what follows the training; once measured, it is one phase."""
    last = plan.time.phases[-1] if plan.time.phases else TimelinePhase(name="publish", seconds=0)
    if measured.publish_s is None:
        return (last,)
    return (TimelinePhase(name=last.name, seconds=measured.publish_s, why="as measured"),)


def times_at(plan: TrainingPlan, step_s: float) -> RepeatTimes:
    """The plan's times at another speed: evaluations slow down like the steps, saves do not."""
    time, steps = plan.time, plan.steps
    slower = step_s / time.step_s if time.step_s else 1.0
    evaluations = repeat_count(steps.total, steps.eval_every) + 1  # the first comes before any step
    saves = max(repeat_count(steps.total, steps.save_every), 1)
    return RepeatTimes(step_s, time["evaluate"] / evaluations * slower, time["save"] / saves)


def _measured_times(plan: TrainingPlan, measured: MeasuredRun) -> RepeatTimes:
    """The plan's for what has not happened yet."""
    planned = times_at(plan, measured.step_s)
    return RepeatTimes(
        step_s=measured.step_s,
        eval_s=planned.eval_s if measured.eval_s is None else measured.eval_s,
        save_s=planned.save_s if measured.save_s is None else measured.save_s,
    )


def _cadence(plan: TrainingPlan, rate: RepeatTimes) -> Cadence:
    train = plan.time["train"]
    share = max(OVERHEAD_SHARE, plan.time["evaluate"] / train if train else 0.0)
    saving = max(OVERHEAD_SHARE, plan.time["save"] / train if train else 0.0)
    return Cadence(
        eval_asked=plan.steps.eval_every,
        save_asked=plan.steps.save_every,
        eval_least=max(math.ceil(rate.eval_s / (share * rate.step_s)), 1),
        save_least=max(math.ceil(rate.save_s / (saving * rate.step_s)), 1),
        eval_s=rate.eval_s,
    )


def _time(
    plan: TrainingPlan,
    measured: MeasuredRun,
    rate: RepeatTimes,
    tail: tuple[TimelinePhase, ...],
    steps: StepsPlan,
) -> TimeBreakdown:
    old, more = plan.time, steps.total - measured.steps_done
    eval_every, save_every = steps.eval_every, steps.save_every
    faster = old.step_s / rate.step_s if rate.step_s and old.step_s else 1.0
    phases = [
        TimelinePhase(name="so far", seconds=measured.elapsed_s, why=f"{measured.steps_done:,} steps done"),
        TimelinePhase(
            name="train", seconds=more * rate.step_s, why=f"{more:,} more steps of {rate.step_s:.3g} s"
        ),
        TimelinePhase(
            name="evaluate",
            seconds=repeat_count(more, eval_every) * rate.eval_s,
            why=f"every {eval_every} steps",
        ),
        TimelinePhase(
            name="save", seconds=repeat_count(more, save_every) * rate.save_s, why=f"every {save_every} steps"
        ),
        *tail,
    ]
    return TimeBreakdown(
        phases=tuple(phases),
        deadline_s=old.deadline_s,
        reserve_s=old.reserve_s,
        step_s=rate.step_s,
        throughput=old.throughput * faster,
        utilisation=min(old.utilisation * faster, 1.0),
        measured=True,
    )


def shape_key(plan: TrainingPlan) -> str:
    """The key of the bounds: plans with the same key need the same memory, and the same kind of network."""
    model, adapter = plan.model, plan.adapter
    within = bool(plan.fsdp and plan.fsdp.within_nodes)
    several = (
        (f"{plan.gpus.nodes} nodes{', sharded within' if within else ''}",) if plan.gpus.nodes > 1 else ()
    )
    parts = (
        plan.task.task_type.value,
        model.architecture,
        f"{model.layers}x{model.hidden}",
        plan.engine.value,
        plan.method.value,
        f"r{adapter.rank}" if adapter else "full",
        plan.gpus.kind.name,
        plan.parallelism.value,
        *several,
    )
    return "/".join(parts)


class ExpectedSpeed(NamedTuple):
    """The speed of all GPUs together. Tokens and MFU are None where the task counts none."""

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
    """Return the expectation, or None if the plan could not estimate its steps."""
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
    """Return tokens (images: samples) per second at an MFU of 1, or None on a CPU, whose peak is made up, and
    for rewards, where a step spends its time generating."""
    if plan.gpus.is_cpu or plan.task.task_type.generates:
        return None
    candidate = plan.candidate
    if candidate.image is not None:
        flops = image_flops(candidate)
    else:
        flops = training_flops(candidate, min(plan.data.total.mean, plan.sequence.length))
    return plan.gpus.kind.bf16_flops * plan.batch.world_size / flops


def _tokens_s(plan: TrainingPlan, samples_s: float) -> float:
    if plan.engine is Engine.NATIVE:
        return plan.time.throughput
    return plan.sequence.tokens_per_epoch / max(plan.sequence.per_epoch, 1) * samples_s
