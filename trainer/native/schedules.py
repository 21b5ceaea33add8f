"""The learning rate as a share of its peak, at any point of the run between 0 and 1."""

from __future__ import annotations

import math

from core.choices import Schedule
from core.plan_parts import LrStage, OptimizerPlan

#: Of one cycle: where it begins and ends, as torch's does.
_ONE_CYCLE_START, _ONE_CYCLE_END = 1 / 25, 1e-5
_MIN_LR = 0.1


def factor(plan: OptimizerPlan, done: float, warmup: float) -> float:
    """`done` is the share of the run that is over, `warmup` the share that climbs to the peak."""
    done = min(max(done, 0.0), 1.0)
    if warmup and done < warmup and plan.schedule is not Schedule.ONE_CYCLE:
        return done / warmup
    through = (done - warmup) / (1 - warmup) if warmup < 1 else 1.0
    return _decayed(plan, done, through, warmup) * _stage(plan.stages, done)


def _decayed(plan: OptimizerPlan, done: float, through: float, warmup: float) -> float:
    floor = plan.min_lr_ratio
    match plan.schedule:
        case Schedule.CONSTANT | Schedule.CONSTANT_WITH_WARMUP:
            return 1.0
        case Schedule.LINEAR:
            return floor + (1 - floor) * (1 - through)
        case Schedule.COSINE:
            return floor + (1 - floor) * _cosine(through)
        case Schedule.COSINE_WITH_MIN_LR:
            least = floor or _MIN_LR
            return least + (1 - least) * _cosine(through)
        case Schedule.COSINE_WITH_RESTARTS:
            turn = 1.0 if through >= 1 else (through * plan.cycles) % 1.0
            return floor + (1 - floor) * _cosine(turn)
        case Schedule.WSD:
            cooldown = plan.cooldown_share or 0.2
            left = (1 - done) / cooldown
            return 1.0 if left >= 1 else floor + (1 - floor) * left
        case Schedule.ONE_CYCLE:
            climb = warmup or 0.3
            if done < climb:
                return _between(_ONE_CYCLE_START, 1.0, done / climb)
            return _between(1.0, _ONE_CYCLE_END, (done - climb) / (1 - climb))


def _cosine(through: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * through))


def _between(start: float, end: float, through: float) -> float:
    return end + (start - end) * _cosine(through)


def _stage(stages: tuple[LrStage, ...], done: float) -> float:
    """The factor of the stage that this point lies in; the last one holds to the end."""
    reached = 0.0
    for stage in stages:
        reached += stage.share
        if done < reached:
            return stage.factor
    return stages[-1].factor if stages else 1.0
