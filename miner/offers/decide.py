"""Decide about an offer. Pure: same offer, time, fleet, history, policy and profile, same decision.

Never raises for an offer that could be read: whatever is odd about it becomes a reason. All rules are
checked, not only up to the first that fails, so that a stored decision can be argued with as a whole.
"""

from __future__ import annotations

import math

from core.domain.decisions import Decision, ExpectedValue, PlanBrief, ScoreFactor, TrainingWorth
from core.domain.units import show_params
from core.domain.wire import MinerTaskOffer
from core.profile.resolve import LoadedProfile
from miner.fleet.base import FleetSnapshot
from miner.offers.fit import FitResult, fit_offer
from miner.offers.history import SuccessChances, SuccessHistory
from miner.offers.parsed_offer import ParsedOffer, parse_offer
from miner.offers.policies.load import LoadedPolicy
from miner.offers.policies.schema import (
    TRAINING_EXPONENT,
    Policy,
    ScoreTerms,
    ValueTerms,
    by_kind,
    hours_limit_for,
)
from miner.offers.rules import RuleInputs, check_rules, keeps_gpus_from

HASH_DIGITS = 16


def decide(
    offer: MinerTaskOffer,
    now: float,
    fleet: FleetSnapshot,
    history: SuccessHistory,
    policy: LoadedPolicy,
    profile: LoadedProfile,
) -> Decision:
    """Decide on `fleet` without what this task holds itself."""
    parsed = parse_offer(offer, None, policy.terms.rules.models_denied)
    return decide_parsed(parsed, now, fleet, history, policy, profile)


def decide_parsed(
    offer: ParsedOffer,
    now: float,
    fleet: FleetSnapshot,
    history: SuccessHistory,
    policy: LoadedPolicy,
    profile: LoadedProfile,
) -> Decision:
    terms = policy.terms
    chances = history.chances(offer.kinds, offer.model.family, offer.params, terms.success, now)
    worth = training_worth(offer, terms, chances, fleet)
    fit = fit_offer(offer, now, fleet, terms.fitting, profile, worth)
    plan = fit.brief
    value = expected_value(offer, terms.value, chances, plan, _gpu_hours(offer, fit))
    factors = score_factors(offer, terms, chances, plan, value)
    score = math.fsum(factor.contribution for factor in factors.values())
    reasons, problem = check_rules(
        RuleInputs(offer, now, fleet, history, chances, terms, profile, fit, value, score)
    )
    if problem is None:
        message = f"Accepted: {offer.task_type} of {offer.hours:g} h"
    else:
        message = f"Not taken: {problem}"
    return Decision(
        accepted=problem is None,
        message=message,
        policy=policy.name,
        policy_hash=policy.digest[:HASH_DIGITS],
        reasons=reasons,
        score=score,
        factors=factors,
        profile=profile.name,
        profile_hash=profile.digest[:HASH_DIGITS],
        threshold=terms.score.threshold,
        placement=fit.placement,
        lane=fit.lane,
        refusal=fit.refusal,
        value=value,
        plan=plan,
    )


def _gpu_hours(offer: ParsedOffer, fit: FitResult) -> float:
    """GPU-hours as held; without a place, as planned; without a plan, the whole time on one GPU."""
    if fit.placement is not None:
        seconds = fit.placement.ends_at - fit.placement.starts_at
        return len(fit.placement.gpus) * seconds / 3600
    if fit.plan is not None and fit.plan.total_s > 0:
        return fit.plan.gpus * fit.plan.total_s / 3600
    return max(offer.hours, 0.0)


# What the task is worth, and the factors of the score


def work_score(hours: float, billions: int) -> float:
    """Return the validators' weight of a task."""
    return max(1.0, 2 * math.sqrt(max(hours, 0.0) * billions))


def expected_value(
    offer: ParsedOffer, terms: ValueTerms, chances: SuccessChances, plan: PlanBrief | None, gpu_hours: float
) -> ExpectedValue:
    """Without a plan: what the task would be worth to a miner that can do all of it."""
    work, success = work_score(offer.hours, offer.billions), chances.success
    win = by_kind(terms.win_chance, offer.kinds, terms.win_prior)
    win *= (plan.share if plan else 1.0) ** by_kind(terms.training_exponent, offer.kinds, TRAINING_EXPONENT)
    punished = by_kind(terms.punished, offer.kinds, 0.0)
    lost = 1 - success + success * punished
    points = work * (terms.win_points * success * win - terms.penalty * lost)
    return ExpectedValue(work, success, win, punished, points, gpu_hours)


#: The price of a GPU rises with this power of the share of GPUs held: the last ones are dear.
SCARCITY = 3.0


def gpu_prices(terms: ValueTerms, fleet: FleetSnapshot) -> tuple[float, ...]:
    """Return the points that other tasks would bring in an hour of the first free GPU, the second, and so
    on."""
    gpus = len(fleet.usable)
    held = len({gpu for hold in fleet.reservations for gpu in hold.gpus})
    return tuple(terms.gpu_hour * min((held + taken) / gpus, 1.0) ** SCARCITY for taken in range(1, gpus + 1))


def training_worth(
    offer: ParsedOffer, policy: Policy, chances: SuccessChances, fleet: FleetSnapshot
) -> TrainingWorth:
    """Return the training's worth. `fleet` is without what the task itself holds."""
    terms = policy.value
    win = by_kind(terms.win_chance, offer.kinds, terms.win_prior)
    points = work_score(offer.hours, offer.billions) * terms.win_points * chances.success * win
    exponent = by_kind(terms.training_exponent, offer.kinds, TRAINING_EXPONENT)
    prices = gpu_prices(terms, fleet) if keeps_gpus_from(policy.rules, offer) else ()
    return TrainingWorth(points, exponent, prices)


def score_factors(
    offer: ParsedOffer, policy: Policy, chances: SuccessChances, plan: PlanBrief | None, value: ExpectedValue
) -> dict[str, ScoreFactor]:
    """Return every factor, those without weight too, so that they can be argued with."""
    terms, weights = policy.score, policy.score.weights
    rows = {
        "task": _task(offer, terms),
        "family": (chances.family.value, f"{offer.model.family.value}: {chances.family}"),
        "success": (chances.task.value, f"{offer.kinds[0]}: {chances.task}"),
        "time": _time(offer, policy),
        "size": _size(offer, terms),
        "hardware": _hardware(plan),
        "value": _value(terms, value),
    }
    factors = {}
    for name, (part, text) in rows.items():
        weight = getattr(weights, name)
        factors[name] = ScoreFactor(part, part * weight, text, weight)
    return factors


def _task(offer: ParsedOffer, terms: ScoreTerms) -> tuple[float, str]:
    return by_kind(terms.task, offer.kinds, 0.0), f"score.task of {offer.kinds[0]}"


def _time(offer: ParsedOffer, policy: Policy) -> tuple[float, str]:
    key_and_limit = hours_limit_for(policy.rules, offer.kinds)
    if key_and_limit is None:
        return 1.0, f"{offer.hours:g} h, no limit"
    _, limit = key_and_limit
    return min(max(1 - offer.hours / limit.hours, 0.0), 1.0), f"{offer.hours:g} of {limit} h"


def _size(offer: ParsedOffer, terms: ScoreTerms) -> tuple[float, str]:
    size = offer.params
    band = next((band for band in terms.size if size in band), None)
    if band is None:
        return 0.0, f"{show_params(size)} is in no band of score.size"
    return terms.size[band], f"{show_params(size)} is in {band}"


def _hardware(plan: PlanBrief | None) -> tuple[float, str]:
    if plan is None:
        return 0.0, "there is no plan"
    return plan.share, f"{plan.share:.0%} of the profile's training fits"


def _value(terms: ScoreTerms, value: ExpectedValue) -> tuple[float, str]:
    points = value.per_gpu_hour
    text = f"{points:.2f} points per GPU-hour, {terms.good_value:g} are good"
    return min(max(points / terms.good_value, 0.0), 1.0), text
