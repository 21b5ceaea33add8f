"""The soft part of a decision: the factors of the score, and what the task is worth."""

from __future__ import annotations

import math

from core.units import show_params
from miner.offers.ask import Ask
from miner.offers.decision import ExpectedValue, Factor, PlanBrief
from miner.offers.history import Chances
from miner.offers.policies.schema import TRAINING_EXPONENT, Policy, Scoring, Value, by_kind, hours_for


def work_score(hours: float, billions: int) -> float:
    """The validators' weight of a task."""
    return max(1.0, 2 * math.sqrt(max(hours, 0.0) * billions))


def expected_value(
    ask: Ask, terms: Value, chances: Chances, brief: PlanBrief | None, gpu_hours: float
) -> ExpectedValue:
    """Without a plan: what the task would be worth to somebody who can do the whole of it."""
    work, success = work_score(ask.hours, ask.billions), chances.success
    win = by_kind(terms.win_chance, ask.kinds, terms.win_prior)
    win *= (brief.share if brief else 1.0) ** by_kind(terms.training_exponent, ask.kinds, TRAINING_EXPONENT)
    punished = by_kind(terms.punished, ask.kinds, 0.0)
    lost = 1 - success + success * punished
    points = work * (terms.win_points * success * win - terms.penalty * lost)
    return ExpectedValue(work, success, win, punished, points, gpu_hours)


def factors_of(
    ask: Ask, policy: Policy, chances: Chances, brief: PlanBrief | None, value: ExpectedValue
) -> dict[str, Factor]:
    """Every factor, those of no weight too: they are to be argued with."""
    terms, weights = policy.score, policy.score.weights
    rows = {
        "task": _task(ask, terms),
        "family": (chances.family.value, f"{ask.model.family.value}: {chances.family}"),
        "success": (chances.task.value, f"{ask.kinds[0]}: {chances.task}"),
        "time": _time(ask, policy),
        "size": _size(ask, terms),
        "hardware": _hardware(brief),
        "value": _value(terms, value),
    }
    return {
        name: Factor(part, part * getattr(weights, name), text, getattr(weights, name))
        for name, (part, text) in rows.items()
    }


def total(factors: dict[str, Factor]) -> float:
    return math.fsum(factor.contribution for factor in factors.values())


def _task(ask: Ask, terms: Scoring) -> tuple[float, str]:
    return by_kind(terms.task, ask.kinds, 0.0), f"score.task of {ask.kinds[0]}"


def _time(ask: Ask, policy: Policy) -> tuple[float, str]:
    found = hours_for(policy.rules, ask.kinds)
    if found is None:
        return 1.0, f"{ask.hours:g} h, no limit"
    _, limit = found
    return min(max(1 - ask.hours / limit.hours, 0.0), 1.0), f"{ask.hours:g} of {limit} h"


def _size(ask: Ask, terms: Scoring) -> tuple[float, str]:
    size = ask.params
    band = next((band for band in terms.size if size in band), None)
    if band is None:
        return 0.0, f"{show_params(size)} is in no band of score.size"
    return terms.size[band], f"{show_params(size)} is in {band}"


def _hardware(brief: PlanBrief | None) -> tuple[float, str]:
    if brief is None:
        return 0.0, "there is no plan"
    return brief.share, f"{brief.share:.0%} of the wished training fits"


def _value(terms: Scoring, value: ExpectedValue) -> tuple[float, str]:
    found = value.per_gpu_hour
    text = f"{found:.2f} points per GPU-hour, {terms.good_value:g} are good"
    return min(max(found / terms.good_value, 0.0), 1.0), text
