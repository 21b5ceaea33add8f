"""The decision about an offer. Pure: same offer, moment, fleet, history, policy and profile, same decision.

Never raises for an offer that could be read: whatever is odd about it becomes a verdict with its reason. All
rules are checked, not up to the first that fails, so that what is stored can be argued with as a whole. Only
what rests on a plan is left open where nothing was planned.
"""

from __future__ import annotations

from core.budget import Refusal
from core.profile.load import LoadedProfile
from core.tasks import ImageModelType
from core.wire import MinerTaskOffer
from miner.fleet.base import FleetSnapshot
from miner.offers.ask import Ask, understand
from miner.offers.decision import Decision, ExpectedValue, Reason, below
from miner.offers.fitting import Fit, fit_in
from miner.offers.history import History
from miner.offers.policies.load import LoadedPolicy
from miner.offers.policies.schema import Policy, Rules
from miner.offers.rules import rules_of_moment, rules_of_offer
from miner.offers.scoring import expected_value, factors_of, total

HASH_DIGITS = 16
#: What a validator is told: the kind of reason, none of our numbers.
_TOLD: dict[str, str] = {
    "task": "this task type is not trained here",
    "family": "this model is not trained here",
    "model": "this model is not trained here",
    "size": "models of this size are not trained here",
    "hours": "the task is too long for this miner",
    "min_hours": "the time is too short for this miner",
    "plan": "the task can't be finished here in the time given",
    "inventory": "no capacity at the moment",
    "engine": "no capacity at the moment",
    "sandbox": "this task type is not trained here",
    "gpus": "no capacity at the moment",
    "jobs": "no capacity at the moment",
    "blackout": "no capacity at that time",
}
_TOLD_OTHERWISE = "not at the moment"
_TOLD_PLAN: dict[Refusal, str] = {
    Refusal.NO_MEMORY: "the model is too large for this miner",
    Refusal.UNKNOWN_SIZE: "the size of the model is not known",
    Refusal.ABSURD_SIZE: "the model is too large for this miner",
    Refusal.NO_GPU: "no capacity at the moment",
    Refusal.EMPTY_DATASET: "the dataset is empty",
}


def decide(
    offer: MinerTaskOffer,
    now: float,
    fleet: FleetSnapshot,
    history: History,
    policy: LoadedPolicy,
    profile: LoadedProfile,
    *,
    image_type: ImageModelType | None = None,
) -> Decision:
    """`fleet` without what this task holds itself; `image_type` as a start names it."""
    ask = understand(offer, image_type, policy.terms.rules.models_denied)
    return decide_ask(ask, now, fleet, history, policy, profile)


def decide_ask(
    ask: Ask,
    now: float,
    fleet: FleetSnapshot,
    history: History,
    policy: LoadedPolicy,
    profile: LoadedProfile,
) -> Decision:
    terms = policy.terms
    chances = history.chances(ask.kinds, ask.model.family, ask.params, terms.success, now)
    fit = fit_in(ask, now, fleet, terms.fitting, profile)
    value = expected_value(ask, terms.value, chances, fit.brief, _gpu_hours(ask, fit))
    factors = factors_of(ask, terms, chances, fit.brief, value)
    score = total(factors)
    reasons = (
        *rules_of_offer(ask, terms.rules),
        *rules_of_moment(ask, terms.rules, profile, fleet, history, chances, _window(ask, now, fit)),
        *fit.reasons,
        *_rewarding(ask, terms, fleet, fit, value, score),
    )
    failed = [reason for reason in reasons if not reason.passed]
    return Decision(
        accepted=not failed,
        message=_message(ask, failed, fit),
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
        refusal=fit.code,
        value=value,
        plan=fit.brief,
    )


def _rewarding(
    ask: Ask, terms: Policy, fleet: FleetSnapshot, fit: Fit, value: ExpectedValue, score: float
) -> tuple[Reason, Reason]:
    if fit.plan is None:
        text = "not judged: nothing was planned"
        return Reason("value", True, text), Reason("score", True, text)
    worth = _worth(_value_rules(ask, terms.rules), value, _held_share(fleet, fit))
    return worth, _enough(terms, score)


def _gpu_hours(ask: Ask, fit: Fit) -> float:
    """As they are held; without a place, as planned; without a plan, the whole time on one GPU."""
    if fit.placement is not None:
        seconds = fit.placement.ends_at - fit.placement.starts_at
        return len(fit.placement.gpus) * seconds / 3600
    if fit.brief is not None and fit.brief.busy_s > 0:
        return fit.brief.gpus * fit.brief.busy_s / 3600
    return max(ask.hours, 0.0)


def _window(ask: Ask, now: float, fit: Fit) -> tuple[float, float]:
    if fit.placement is not None:
        return fit.placement.starts_at, fit.placement.ends_at
    return now, now + max(ask.hours, 0.0) * 3600


def _held_share(fleet: FleetSnapshot, fit: Fit) -> float:
    """Of the usable GPUs, once this task has its own."""
    usable = {gpu.id for gpu in fleet.usable}
    held = {gpu for hold in fleet.holds for gpu in hold.gpus}
    held |= set(fit.placement.gpus) if fit.placement else usable
    return len(held & usable) / len(usable) if usable else 1.0


def _value_rules(ask: Ask, rules: Rules) -> Rules:
    """Without `min_value_full` for a model whose size it is not for."""
    sizes = rules.min_value_full_size
    if sizes is None or ask.model.is_image or ask.params in sizes:
        return rules
    return rules.model_copy(update={"min_value_full": None})


def _least_value(rules: Rules, held: float) -> float | None:
    low, high = rules.min_value, rules.min_value_full
    if high is None:
        return low
    return (low or 0.0) + (high - (low or 0.0)) * held


def _worth(rules: Rules, value: ExpectedValue, held: float) -> Reason:
    found, least = value.per_gpu_hour, _least_value(rules, held)
    text = f"{found:.3f} points expected of a GPU's hour"
    if least is None:
        return Reason("value", True, text)
    if rules.min_value_full is None:
        asked, way = f"{least:g}", f"rules.min_value of {below(found)}"
    else:
        asked, way = f"{least:.3f} with {held:.0%} of the GPUs held", _values_for(rules, found, held)
    if found >= least:
        return Reason("value", True, f"{text}, at least {asked}")
    return Reason("value", False, f"{text}, less than {asked}", way)


def _values_for(rules: Rules, found: float, held: float) -> str:
    """What would have let a task of such a value pass."""
    low = rules.min_value or 0.0
    if found < low or held <= 0:
        return f"rules.min_value and rules.min_value_full of {below(found)}"
    return f"rules.min_value_full of {below(low + (found - low) / held)}, or fewer GPUs held"


def _enough(terms: Policy, score: float) -> Reason:
    threshold = terms.score.threshold
    if threshold is None:
        return Reason("score", True, f"{score:.3f}; there is no threshold")
    if score > threshold:
        return Reason("score", True, f"{score:.3f} is above {threshold:g}")
    way = f"score.threshold of {below(score)}, or {threshold - score:.3f} more from the factors"
    return Reason("score", False, f"{score:.3f} is not above {threshold:g}", way)


def _message(ask: Ask, failed: list[Reason], fit: Fit) -> str:
    """The first reason in its plainest words; nothing of our numbers, GPUs or rules."""
    if not failed:
        return f"Accepted: {ask.task_type} of {ask.hours:g} h"
    first = failed[0].rule
    told = _TOLD.get(first, _TOLD_OTHERWISE)
    if first == "plan" and fit.code is not None:
        told = _TOLD_PLAN.get(fit.code, told)
    return f"Not taken: {told}"
