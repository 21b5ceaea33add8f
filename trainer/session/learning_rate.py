"""The learning rate: its schedule, and its reaction to a plateau. `rate_search` looks for its peak.

The number of steps is a forecast that the clock keeps correcting, so the schedule spreads what is left of
the way over the steps that are left: a new forecast bends the curve and never makes it jump.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from core.domain.choices import LrSchedule
from core.planning.plan import OptimizerPlan, PlateauPlan

#: Where one-cycle begins, as a share of the peak.
ONE_CYCLE_START = 1 / 25


@dataclass
class ScheduleProgress:
    """The progress of a training from 0 to 1, over a forecast number of steps."""

    total: int
    #: Steps up to the peak, if the training is long enough.
    asked_warmup: int = 0
    done: int = 0
    fraction: float = 0.0
    #: Where the warmup ended.
    warmed: float = field(default=0.0)

    @property
    def warmup(self) -> int:
        """At most half of the steps, so that a shortened run reaches the peak too."""
        return min(self.asked_warmup, self.total // 2)

    def advance(self) -> None:
        """One more step is done."""
        self.fraction += (1 - self.fraction) / max(self.total - self.done, 1)
        self.done += 1
        if self.done <= self.warmup:
            self.warmed = self.fraction

    def forecast(self, total: int) -> None:
        """Correct the number of steps; it is never less than those done."""
        self.total = max(total, self.done)

    @property
    def decayed(self) -> float:
        """The progress since the warmup, from 0 to 1."""
        left = 1 - self.warmed
        return (self.fraction - self.warmed) / left if left > 0 else 1.0

    def state(self) -> dict[str, float]:
        return {"done": self.done, "fraction": self.fraction, "warmed": self.warmed, "total": self.total}

    def restore(self, state: dict[str, float]) -> None:
        self.done, self.total = int(state["done"]), int(state["total"])
        self.fraction, self.warmed = float(state["fraction"]), float(state["warmed"])


def rate_factor(plan: OptimizerPlan, schedule: ScheduleProgress) -> float:
    """The factor on the peak rate for the step that comes next."""
    if plan.schedule is LrSchedule.CONSTANT:
        return _stage_factor(plan, schedule.fraction)
    if schedule.done < schedule.warmup:
        # Not from zero: a first step at a rate of nothing is a step thrown away.
        return _warmup_factor(plan, (schedule.done + 1) / schedule.warmup) * _stage_factor(
            plan, schedule.fraction
        )
    shape = _decay_factor(plan, schedule)
    return (plan.min_lr_ratio + (1 - plan.min_lr_ratio) * shape) * _stage_factor(plan, schedule.fraction)


def _warmup_factor(plan: OptimizerPlan, fraction: float) -> float:
    """Linear; for one-cycle from a 25th along a cosine, as its inventors' implementations do."""
    if plan.schedule is LrSchedule.ONE_CYCLE:
        return ONE_CYCLE_START + (1 - ONE_CYCLE_START) * (1 - _cosine(fraction))
    return fraction


def _decay_factor(plan: OptimizerPlan, schedule: ScheduleProgress) -> float:
    """From 1 at the peak to 0."""
    fraction = min(max(schedule.decayed, 0.0), 1.0)
    match plan.schedule:
        case LrSchedule.CONSTANT_WITH_WARMUP:
            return 1.0
        case LrSchedule.LINEAR:
            return 1 - fraction
        case LrSchedule.COSINE_WITH_RESTARTS:
            # The way is a sum of parts: a hair short of a restart is the restart.
            return _cosine((fraction * plan.cycles + 1e-9) % 1.0 if fraction < 1 else 1.0)
        case LrSchedule.WSD:
            cooldown = plan.cooldown_share or 0.0
            if cooldown <= 0:
                return 1.0
            return min((1 - schedule.fraction) / cooldown, 1.0)
        case _:
            return _cosine(fraction)


def _cosine(fraction: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * fraction))


def _stage_factor(plan: OptimizerPlan, fraction: float) -> float:
    """The factor of the stage that this point lies in; 1 without stages."""
    reached = 0.0
    for stage in plan.stages:
        reached += stage.share
        if fraction < reached - 1e-9:
            return stage.factor
    return plan.stages[-1].factor if plan.stages else 1.0


#: However long a plateau lasts or a score improves, the rate stays within these factors of the schedule's.
MIN_FACTOR, MAX_FACTOR = 0.1, 1.5


@dataclass
class PlateauFactor:
    plan: PlateauPlan
    factor: float = 1.0
    #: Evaluations since the last better one.
    waited: int = 0

    def update(self, better: bool) -> str | None:
        """After an evaluation: a text of what changed, or None."""
        before = self.factor
        if better:
            self.waited = 0
            self.factor = min(self.factor * self.plan.growth, MAX_FACTOR)
        else:
            self.waited += 1
            if self.waited >= self.plan.patience:
                self.waited = 0
                self.factor = max(self.factor * self.plan.factor, MIN_FACTOR)
        if self.factor == before:
            return None
        why = "improves" if better else f"has not improved in {self.plan.patience} evaluations"
        return f"learning rate × {self.factor:.3g} (was × {before:.3g}): the score {why}"

    def state(self) -> dict[str, float]:
        return {"factor": self.factor, "waited": self.waited}

    def restore(self, state: dict[str, float]) -> None:
        self.factor, self.waited = float(state["factor"]), int(state["waited"])
