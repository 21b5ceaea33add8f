"""How far a training is, and the learning rate that belongs there.

The number of steps is a forecast that the clock corrects all the time, so nothing here counts on it: the way
that is left is spread over the steps that are left, and whatever their number turns out to be, the decay ends
with the last one. A change of the forecast bends the curve and never makes it jump.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from core.choices import Schedule
from core.plan_parts import OptimizerPlan

#: Where one-cycle begins, as a part of the peak.
ONE_CYCLE_START = 1 / 25


@dataclass
class Pace:
    """The way from 0 to 1."""

    total: int
    #: Steps up to the peak, if the training is long enough.
    asked_warmup: int = 0
    done: int = 0
    fraction: float = 0.0
    #: Where the warmup ended.
    warmed: float = field(default=0.0)

    @property
    def warmup(self) -> int:
        """At most half of the steps: in a run that the clock has cut the peak is to be reached too."""
        return min(self.asked_warmup, self.total // 2)

    def advance(self) -> None:
        """One more step is done."""
        self.fraction += (1 - self.fraction) / max(self.total - self.done, 1)
        self.done += 1
        if self.done <= self.warmup:
            self.warmed = self.fraction

    def forecast(self, total: int) -> None:
        """The training will have so many steps; it ends no earlier than it has got."""
        self.total = max(total, self.done)

    @property
    def decayed(self) -> float:
        """The way since the warmup, from 0 to 1."""
        left = 1 - self.warmed
        return (self.fraction - self.warmed) / left if left > 0 else 1.0

    def state(self) -> dict[str, float]:
        return {"done": self.done, "fraction": self.fraction, "warmed": self.warmed, "total": self.total}

    def restore(self, state: dict[str, float]) -> None:
        self.done, self.total = int(state["done"]), int(state["total"])
        self.fraction, self.warmed = float(state["fraction"]), float(state["warmed"])


def rate_factor(plan: OptimizerPlan, pace: Pace) -> float:
    """The factor on the peak rate for the step that comes next."""
    if plan.schedule is Schedule.CONSTANT:
        return _stage(plan, pace.fraction)
    if pace.done < pace.warmup:
        # Not from zero: a first step at a rate of nothing is a step thrown away.
        return _rise(plan, (pace.done + 1) / pace.warmup) * _stage(plan, pace.fraction)
    shape = _shape(plan, pace)
    return (plan.min_lr_ratio + (1 - plan.min_lr_ratio) * shape) * _stage(plan, pace.fraction)


def _rise(plan: OptimizerPlan, way: float) -> float:
    """Straight up; one-cycle from a 25th, along a cosine, as its inventors' implementations do."""
    if plan.schedule is Schedule.ONE_CYCLE:
        return ONE_CYCLE_START + (1 - ONE_CYCLE_START) * (1 - _cosine(way))
    return way


def _shape(plan: OptimizerPlan, pace: Pace) -> float:
    """From 1 at the peak to 0."""
    way = min(max(pace.decayed, 0.0), 1.0)
    match plan.schedule:
        case Schedule.CONSTANT_WITH_WARMUP:
            return 1.0
        case Schedule.LINEAR:
            return 1 - way
        case Schedule.COSINE_WITH_RESTARTS:
            # The way is a sum of parts: a hair short of a restart is the restart.
            return _cosine((way * plan.cycles + 1e-9) % 1.0 if way < 1 else 1.0)
        case Schedule.WSD:
            cooldown = plan.cooldown_share or 0.0
            if cooldown <= 0:
                return 1.0
            return min((1 - pace.fraction) / cooldown, 1.0)
        case _:
            return _cosine(way)


def _cosine(way: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * way))


def _stage(plan: OptimizerPlan, fraction: float) -> float:
    """The factor of the stage that this point lies in; 1 without stages."""
    reached = 0.0
    for stage in plan.stages:
        reached += stage.share
        if fraction < reached - 1e-9:
            return stage.factor
    return plan.stages[-1].factor if plan.stages else 1.0
