"""What follows when an image engine's steps take other than the plan's time: arithmetic alone.

An engine reads its number of steps once, when it starts. Beside going on, there is only another start, which
costs what the first one took, and the steps that are done. So going on is compared with it, by the steps that
are in the file that is submitted in the end: those before the last save, if the clock ends the engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from core.domain.choices import Engine, LrSchedule
from core.domain.units import show_seconds
from core.planning.plan import TrainingPlan

#: Measured steps before the decision: as many, or a tenth of a short training, but at least a few.
TIMED_STEPS, TIMED_SHARE, LEAST_TIMED = 50, 0.1, 5
#: Where steps are so slow that they have taken this share of the launch's time, the least number is enough:
#: else the time would be over, with nothing saved, before it is decided.
TIMED_TIME_SHARE = 0.05
#: The very first steps load and compile.
UNUSUAL_STEPS = 2
#: A forecast may be off by this part of what is left.
SLACK = 0.05
#: A decay may be cut off where its rate has come down to this share of the peak.
LOW_RATE = 0.1
#: Fewer steps that end their decay are worth so many of a training that is cut off at a high rate.
CUT_OFF_WORTH = 0.5
#: Another start must bring so many more steps than going on: it can fail, and the first one works.
LEAST_GAIN = 1.2
_CONSTANT = (LrSchedule.CONSTANT, LrSchedule.CONSTANT_WITH_WARMUP)


class Measured(NamedTuple):
    #: Steps that are done.
    step: int
    step_s: float
    #: From the launch to the first step: loading, encoding, compiling.
    start_s: float
    #: From now until the engine is ended.
    left_s: float


@dataclass(frozen=True)
class Replan:
    #: The steps of another start; None: the engine goes on.
    restart: int | None
    #: What was decided, by which figures.
    text: str


def timed_steps(total: int, taken: float = 0.0) -> int:
    """How many steps are measured before it is decided; `taken`: the share of the launch's time that those
    measured so far have taken."""
    usual = min(TIMED_STEPS, max(round(TIMED_SHARE * total), LEAST_TIMED))
    return LEAST_TIMED if taken >= TIMED_TIME_SHARE else usual


def replan(plan: TrainingPlan, measured: Measured) -> Replan:
    step, step_s, start_s, left_s = measured
    total = plan.steps.total
    with_saves = step_s + save_seconds(plan)
    reach = step + max(int(left_s / with_saves), 0)
    again = max(int((left_s - start_s) / with_saves * (1 - SLACK)), 0)
    figures = (
        f"{step_s:.3g} s a step after {step:,} (the plan counted on {plan.time.step_s:.3g} s),"
        f" {show_seconds(left_s)} left, another start takes {show_seconds(start_s)}"
    )
    if (total - step) * with_saves <= left_s * (1 + SLACK):
        return _longer(plan, again, figures)
    kept = saved_steps(plan, reach)
    ending = f"{reach:,} of {total:,} steps can be done, {kept:,} of them saved"
    ending += f", at {rate_at(plan, kept / total):.0%} of the peak rate" if is_cut_off(plan, kept) else ""
    if again >= max(LEAST_GAIN * worth(plan, kept), 1):
        return Replan(again, f"started again with {again:,} steps: {figures}; {ending}")
    return Replan(None, f"goes on and ends early: {figures}; {ending}; started again {again:,}")


def _longer(plan: TrainingPlan, again: int, figures: str) -> Replan:
    """All planned steps fit. Where the clock had cut them down, more may fit than the plan believed."""
    total, wanted = plan.steps.total, plan.steps.wanted or plan.steps.total
    more = min(again, wanted)
    if wanted <= total:
        return Replan(None, f"goes on, all {total:,} steps fit: {figures}")
    if more >= LEAST_GAIN * total:
        return Replan(
            more, f"started again with {more:,} of {wanted:,} wanted steps instead of {total:,}: {figures}"
        )
    return Replan(
        None, f"goes on, all {total:,} steps fit: {figures}; {more:,} of {wanted:,} wanted ones would as well"
    )


def worth(plan: TrainingPlan, step: int) -> float:
    """The steps of a file for a comparison with one of another training."""
    return step * CUT_OFF_WORTH if is_cut_off(plan, step) else step


def is_cut_off(plan: TrainingPlan, step: int) -> bool:
    """Whether a file of this step comes from the part of a decay where the rate is still high."""
    total = plan.steps.total
    return step < total and not is_constant(plan) and rate_at(plan, step / total) > LOW_RATE


def save_seconds(plan: TrainingPlan) -> float:
    """What saving adds to a step, as planned."""
    return plan.time["save"] / max(plan.steps.total, 1)


def saved_steps(plan: TrainingPlan, reach: int) -> int:
    """Those before the last save, where the engine is ended after `reach` steps."""
    every = save_interval(plan)
    return reach if reach >= plan.steps.total else reach // every * every


def save_interval(plan: TrainingPlan) -> int:
    """Steps between two files: sd-scripts saves at the end of epochs."""
    if plan.engine is Engine.KOHYA and plan.image is not None:
        return max(plan.image.save_every_epochs * plan.steps.per_epoch, 1)
    return max(plan.steps.save_every, 1)


def is_constant(plan: TrainingPlan) -> bool:
    return plan.optimizer.schedule in _CONSTANT


def rate_at(plan: TrainingPlan, part: float) -> float:
    """The rate after this part of the steps as a share of the peak. Other schedules are taken for a cosine,
    which is what ai-toolkit makes of them."""
    if is_constant(plan):
        return 1.0
    part = min(max(part, 0.0), 1.0)
    falls = 1 - part if plan.optimizer.schedule is LrSchedule.LINEAR else (1 + math.cos(math.pi * part)) / 2
    least = plan.optimizer.min_lr_ratio
    return least + (1 - least) * falls
