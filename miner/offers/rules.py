"""The rules that an offer must meet, each with its reason, its number and what would have to change.

A rule is one record: its name in stored decisions, the message to a validator when it fails, and its check.
To add one, add its key to `policies/schema.py` and its check here; decisions list them in this order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from core.domain.decisions import ExpectedValue, Reason, just_below
from core.domain.units import show_params, show_seconds
from core.models.facts import Family
from core.profile.resolve import LoadedProfile, selector_matches
from miner.fleet.base import FleetSnapshot, joint_ability
from miner.offers.fit import FitResult, RuleVerdict, able_to_train, training_engine
from miner.offers.history import SuccessChances, SuccessHistory
from miner.offers.parsed_offer import ParsedOffer
from miner.offers.policies.schema import Policy, PolicyRules, hours_limit_for

NO_CAPACITY = "no capacity at the moment"
_NO_SUCH_TASK = "this task type is not trained here"
_NO_SUCH_MODEL = "this model is not trained here"


class RuleInputs(NamedTuple):
    """All that a rule may look at."""

    offer: ParsedOffer
    now: float
    fleet: FleetSnapshot
    history: SuccessHistory
    chances: SuccessChances
    terms: Policy
    profile: LoadedProfile
    fit: FitResult
    value: ExpectedValue
    score: float


RuleCheck = Callable[[RuleInputs], RuleVerdict | list[RuleVerdict]]


class Rule(NamedTuple):
    name: str
    #: The message to a validator when it fails: the kind of reason, none of our numbers.
    public: str
    check: RuleCheck


RULES: list[Rule] = []


def rule(name: str, public: str = "not at the moment") -> Callable[[RuleCheck], RuleCheck]:
    """Declare the decorated check as a rule."""

    def declare(check: RuleCheck) -> RuleCheck:
        RULES.append(Rule(name, public, check))
        return check

    return declare


def check_rules(inputs: RuleInputs) -> tuple[tuple[Reason, ...], str | None]:
    """Return the reasons of all rules, and the message to a validator of the first that failed, if any."""
    reasons: list[Reason] = []
    message: str | None = None
    for name, public, check in RULES:
        result = check(inputs)
        for passed, text, way, own_message in result if isinstance(result, list) else (result,):
            if not passed and message is None:
                message = own_message or public
            reasons.append(Reason(name, passed, text, way))
    return tuple(reasons), message


# What the offer alone decides


@rule("task", _NO_SUCH_TASK)
def _task(inputs: RuleInputs) -> RuleVerdict:
    task_type, allowed = inputs.offer.task_type, inputs.terms.rules.tasks
    word = task_type.word
    if allowed is None or task_type in allowed:
        return RuleVerdict(True, f"{word} is trained here")
    words = ", ".join(kind.word for kind in allowed)
    return RuleVerdict(False, f"{word} is not among {words}", f"{word} in rules.tasks")


@rule("family", _NO_SUCH_MODEL)
def _family(inputs: RuleInputs) -> RuleVerdict:
    model, allowed = inputs.offer.model, inputs.terms.rules.families
    family = model.family
    if model.is_image:
        return RuleVerdict(True, "not applied to image models")
    shown = "an unknown family" if family is Family.UNKNOWN else family.value
    if allowed is None or family in allowed:
        return RuleVerdict(True, f"{shown} is taken")
    words = ", ".join(family.value for family in allowed)
    return RuleVerdict(False, f"{shown} is not among {words}", f"{family.value} in rules.families")


@rule("model", _NO_SUCH_MODEL)
def _denied(inputs: RuleInputs) -> RuleVerdict:
    denied = inputs.offer.denied
    if denied is None:
        return RuleVerdict(True, "the model is not denied")
    return RuleVerdict(False, f"the model's name matches {denied}", f"{denied} out of rules.models_denied")


@rule("size", "models of this size are not trained here")
def _size(inputs: RuleInputs) -> RuleVerdict:
    offer, band = inputs.offer, inputs.terms.rules.size
    shown = show_params(offer.params)
    if offer.size.mismatch:
        stated, named = map(show_params, offer.size.mismatch)
        shown += f" (the offer says {stated}, the name {named}; the larger one is planned for)"
    if band is None or offer.model.is_image or offer.params in band:
        return RuleVerdict(True, f"{shown} parameters are taken")
    return RuleVerdict(False, f"{shown} parameters are outside {band}", "a wider rules.size")


@rule("hours", "the task is too long for this miner")
def _hours(inputs: RuleInputs) -> RuleVerdict:
    hours, kinds = inputs.offer.hours, inputs.offer.kinds
    key_and_limit = hours_limit_for(inputs.terms.rules, kinds)
    if key_and_limit is None:
        return RuleVerdict(True, f"{hours:g} h; {kinds[0]} has no limit")
    key, limit = key_and_limit
    if limit.allows(hours):
        return RuleVerdict(True, f"{hours:g} h are within {limit} for {kinds[0]}")
    text = f"{hours:g} h are over the limit of {limit} for {kinds[0]}"
    return RuleVerdict(False, text, f"{key} of {math.ceil(hours * 100) / 100:g}")


@rule("min_hours", "the time is too short for this miner")
def _min_hours(inputs: RuleInputs) -> RuleVerdict:
    hours, least = inputs.offer.hours, inputs.terms.rules.min_hours
    if hours <= 0:
        return RuleVerdict(False, f"{hours:g} h leave no time to train", "hours in the offer")
    if hours >= least:
        return RuleVerdict(True, f"{hours:g} h are at least {least:g}")
    way = f"rules.min_hours of {math.floor(hours * 100) / 100:g}"
    return RuleVerdict(False, f"{hours:g} h are less than {least:g}", way)


# What depends on the backend, on other jobs, on the clock and on earlier jobs


@rule("backend", NO_CAPACITY)
def _backend(inputs: RuleInputs) -> RuleVerdict:
    """Nothing can be trained without one: a refusal costs nothing, a missed task does."""
    ability = joint_ability(inputs.fleet.abilities)
    if ability.problem is not None:
        text = f"nothing can be trained: {ability.problem}"
        return RuleVerdict(False, text, "a backend; see god-miner doctor")
    engine = training_engine(inputs.offer, inputs.profile) if ability.missing else None
    missing = ability.missing.get(engine) if engine else None
    if missing is not None:
        return RuleVerdict(False, f"such tasks cannot be trained: {missing}", "what is missing")
    return RuleVerdict(True, "the backend has no known problem")


@rule("sandbox", _NO_SUCH_TASK)
def _sandbox(inputs: RuleInputs) -> RuleVerdict:
    if not inputs.offer.task_type.generates:
        return RuleVerdict(True, "runs no third-party code")
    problem = joint_ability(able_to_train(inputs.offer, inputs.fleet, inputs.profile)).no_sandbox
    if problem is None:
        return RuleVerdict(True, "reward functions are run in a sandbox")
    return RuleVerdict(False, f"reward functions need a sandbox: {problem}", "Docker, or bubblewrap")


@rule("jobs", NO_CAPACITY)
def _jobs(inputs: RuleInputs) -> RuleVerdict:
    """Offers that hold a place count like jobs: each may become one at any moment."""
    limit = inputs.terms.rules.max_jobs
    taken = len({hold.key for hold in inputs.fleet.reservations})
    if limit is None:
        return RuleVerdict(True, f"{taken} jobs and held offers; no limit")
    if taken < limit:
        return RuleVerdict(True, f"{taken} of {limit} jobs and held offers")
    text = f"all {limit} places for jobs are taken by {taken}"
    return RuleVerdict(False, text, f"rules.max_jobs of {taken + 1}, or a job that ends")


@rule("blackout", "no capacity at that time")
def _blackout(inputs: RuleInputs) -> RuleVerdict:
    place, blackouts = inputs.fit.placement, inputs.terms.rules.blackout
    if place is not None:
        start, end = place.starts_at, place.ends_at
    else:
        start, end = inputs.now, inputs.now + max(inputs.offer.hours, 0.0) * 3600
    closed = next((blackout for blackout in blackouts if blackout.touches(start, end)), None)
    if closed is None:
        return RuleVerdict(True, f"{len(blackouts)} blackouts, none in the way")
    text = f"it would run for {show_seconds(end - start)}, into the blackout {closed} UTC"
    return RuleVerdict(False, text, "an offer at another time, or another rules.blackout")


@rule("success")
def _success(inputs: RuleInputs) -> RuleVerdict:
    chance, least = inputs.chances.success, inputs.terms.rules.min_success
    text = f"the chance of success is {chance:.0%}, the least is {least:.0%}"
    if chance >= least:
        return RuleVerdict(True, text)
    return RuleVerdict(False, text, f"rules.min_success of {just_below(chance)}, or more jobs that succeed")


@rule("experience")
def _experience(inputs: RuleInputs) -> list[RuleVerdict]:
    offer, verdicts = inputs.offer, []
    for name, entry in inputs.terms.rules.experience.items():
        if selector_matches(entry.when, offer.task_type, offer.model, offer.rows):
            done, least = inputs.history.published(offer.task_type), entry.published
            text = f"{done} of {least} {offer.task_type.word} jobs published that {name} asks for"
            way = (
                "" if done >= least else f"{least - done} more published, or another rules.experience.{name}"
            )
            verdicts.append(RuleVerdict(done >= least, text, way))
    return verdicts or [RuleVerdict(True, "no experience is asked for")]


# What depends on the plan


@rule("inventory", NO_CAPACITY)
def _inventory(inputs: RuleInputs) -> RuleVerdict:
    """GPUs that cannot be seen may be gone: a refusal costs nothing, a missed task does."""
    fleet = inputs.fleet
    if fleet.problem is not None:
        text = f"the GPUs could not be read this time: {fleet.problem}"
        return RuleVerdict(False, text, "an inventory that can be read; see god-miner doctor")
    unusable = [gpu for gpu in fleet.gpus if gpu.unusable_reason is not None]
    out = [f"{gpu.id} ({gpu.unusable_reason})" for gpu in unusable if not gpu.node]
    if of_nodes := sum(bool(gpu.node) for gpu in unusable):
        out.append(f"{of_nodes} of nodes")
    text = f"{len(fleet.usable)} GPUs are usable" + (f"; not {', '.join(out)}" if out else "")
    return RuleVerdict(True, text)


@rule("plan", "the task cannot be finished here in the time given")
def _plan(inputs: RuleInputs) -> list[RuleVerdict]:
    verdict = inputs.fit.plan_verdict
    return [] if verdict is None else [verdict]


@rule("gpus", NO_CAPACITY)
def _gpus(inputs: RuleInputs) -> RuleVerdict:
    return inputs.fit.gpus_verdict


@rule("value")
def _value(inputs: RuleInputs) -> RuleVerdict:
    if inputs.fit.plan is None:
        return RuleVerdict(True, "not judged: nothing was planned")
    rules, value = inputs.terms.rules, inputs.value.per_gpu_hour
    low, high = rules.min_value, rules.min_value_full
    if not keeps_gpus_from(rules, inputs.offer):
        high = None
    text = f"{value:.3f} points expected of a GPU's hour"
    if high is not None:
        held = _held_share(inputs.fleet, inputs.fit)
        low = low or 0.0
        least = low + (high - low) * held
        shown = f"{least:.3f} with {held:.0%} of the GPUs held"
        if value < low or held <= 0:
            way = f"rules.min_value and rules.min_value_full of {just_below(value)}"
        else:
            way = f"rules.min_value_full of {just_below(low + (value - low) / held)}, or fewer GPUs held"
    elif low is not None:
        least, shown, way = low, f"{low:g}", f"rules.min_value of {just_below(value)}"
    else:
        return RuleVerdict(True, text)
    if value >= least:
        return RuleVerdict(True, f"{text}, at least {shown}")
    return RuleVerdict(False, f"{text}, less than {shown}", way)


def keeps_gpus_from(rules: PolicyRules, offer: ParsedOffer) -> bool:
    """Return True if GPUs are kept from such a task for others that are worth more."""
    sizes = rules.min_value_full_size
    return sizes is None or offer.model.is_image or offer.params in sizes


def _held_share(fleet: FleetSnapshot, fit: FitResult) -> float:
    """Share of the usable GPUs that is held, once this task has its own; not those that others use."""
    usable = {gpu.id for gpu in fleet.usable if gpu.busy_until(fleet.taken_at) is None}
    held = {gpu for hold in fleet.reservations for gpu in hold.gpus}
    held |= set(fit.placement.gpus) if fit.placement else usable
    return len(held & usable) / len(usable) if usable else 1.0


@rule("score")
def _score(inputs: RuleInputs) -> RuleVerdict:
    if inputs.fit.plan is None:
        return RuleVerdict(True, "not judged: nothing was planned")
    score, threshold = inputs.score, inputs.terms.score.threshold
    if threshold is None:
        return RuleVerdict(True, f"{score:.3f}; there is no threshold")
    if score > threshold:
        return RuleVerdict(True, f"{score:.3f} is above {threshold:g}")
    way = f"score.threshold of {just_below(score)}, or {threshold - score:.3f} more from the factors"
    return RuleVerdict(False, f"{score:.3f} is not above {threshold:g}", way)
