"""The hard rules of a policy, each as a verdict with its number and what would have to change."""

from __future__ import annotations

import math
from collections.abc import Iterator

from core.choices import Engine
from core.errors import ConfigError
from core.models import Family
from core.profile.annotations import engine_for
from core.profile.load import LoadedProfile
from core.profile.resolve import matches, resolve
from core.tasks import TaskType
from core.units import show_params, show_seconds
from miner.fleet.base import FleetSnapshot
from miner.offers.ask import Ask
from miner.offers.decision import Reason, below
from miner.offers.history import Chances, History
from miner.offers.policies.schema import Rules, hours_for
from miner.offers.policies.words import WORD_OF


def rules_of_offer(ask: Ask, rules: Rules) -> Iterator[Reason]:
    """What the offer alone decides."""
    yield _task(ask, rules)
    yield _family(ask, rules)
    yield _denied(ask)
    yield _size(ask, rules)
    yield _hours(ask, rules)
    yield _least_hours(ask, rules)


def rules_of_moment(
    ask: Ask,
    rules: Rules,
    profile: LoadedProfile,
    fleet: FleetSnapshot,
    history: History,
    chances: Chances,
    window: tuple[float, float],
) -> Iterator[Reason]:
    """What depends on what else runs, on the clock and on what was done before."""
    yield _engine(ask, profile, fleet)
    yield _sandbox(ask, fleet)
    yield _jobs(rules, profile, fleet)
    yield _blackout(rules, window)
    yield _success(rules, chances)
    yield from _experience(ask, rules, history)


def _task(ask: Ask, rules: Rules) -> Reason:
    word = WORD_OF[ask.task_type]
    if rules.tasks is None or ask.task_type in rules.tasks:
        return Reason("task", True, f"{word} is trained here")
    known = ", ".join(WORD_OF[kind] for kind in rules.tasks)
    return Reason("task", False, f"{word} is not among {known}", f"{word} in rules.tasks")


def _family(ask: Ask, rules: Rules) -> Reason:
    family = ask.model.family
    if ask.model.is_image:
        return Reason("family", True, "image models are told apart by their type")
    shown = "a family that nobody knows" if family is Family.UNKNOWN else family.value
    if rules.families is None or family in rules.families:
        return Reason("family", True, f"{shown} is taken")
    known = ", ".join(one.value for one in rules.families)
    return Reason("family", False, f"{shown} is not among {known}", f"{family.value} in rules.families")


def _denied(ask: Ask) -> Reason:
    if ask.denied is None:
        return Reason("model", True, "the model is not denied")
    return Reason(
        "model",
        False,
        f"the model's name matches {ask.denied}",
        f"{ask.denied} out of rules.models_denied",
    )


def _size(ask: Ask, rules: Rules) -> Reason:
    size = ask.params
    shown = show_params(size)
    if ask.size.doubt:
        stated, named = map(show_params, ask.size.doubt)
        shown += f" (the offer says {stated}, the name {named}; the larger one is planned for)"
    if rules.size is None or ask.model.is_image or size in rules.size:
        return Reason("size", True, f"{shown} parameters are taken")
    return Reason("size", False, f"{shown} parameters are outside {rules.size}", "a wider rules.size")


def _hours(ask: Ask, rules: Rules) -> Reason:
    found = hours_for(rules, ask.kinds)
    if found is None:
        return Reason("hours", True, f"{ask.hours:g} h; {ask.kinds[0]} has no limit")
    key, limit = found
    if limit.allows(ask.hours):
        return Reason("hours", True, f"{ask.hours:g} h are within {limit} for {ask.kinds[0]}")
    text = f"{ask.hours:g} h are over the limit of {limit} for {ask.kinds[0]}"
    return Reason("hours", False, text, f"{key} of {math.ceil(ask.hours * 100) / 100:g}")


def _least_hours(ask: Ask, rules: Rules) -> Reason:
    if ask.hours >= rules.min_hours and ask.hours > 0:
        return Reason("min_hours", True, f"{ask.hours:g} h are at least {rules.min_hours:g}")
    if ask.hours <= 0:
        return Reason("min_hours", False, f"{ask.hours:g} h leave no time to train", "hours in the offer")
    text = f"{ask.hours:g} h are less than {rules.min_hours:g}"
    return Reason("min_hours", False, text, f"rules.min_hours of {math.floor(ask.hours * 100) / 100:g}")


def _engine(ask: Ask, profile: LoadedProfile, fleet: FleetSnapshot) -> Reason:
    """Nothing can be trained without one: a refusal costs nothing, a missed task does."""
    can = fleet.ability
    if can.trouble is not None:
        text = f"nothing can be trained: {can.trouble}"
        return Reason("engine", False, text, "an engine; see god-miner doctor")
    engine = _training_engine(ask, profile) if can.lacks else None
    lacking = can.lacks.get(engine) if engine else None
    if lacking is not None:
        return Reason("engine", False, f"such tasks can't be trained: {lacking}", "what is lacking")
    return Reason("engine", True, "nothing is known against the engine")


def _training_engine(ask: Ask, profile: LoadedProfile) -> Engine | None:
    try:
        targets = resolve(profile, ask.task_type, ask.model).targets
    except ConfigError:  # told by the verdict on the plan
        return None
    return engine_for(targets, ask.task_type, ask.image_type)


def _sandbox(ask: Ask, fleet: FleetSnapshot) -> Reason:
    why = fleet.ability.no_sandbox
    if ask.task_type is not TaskType.GRPO:
        return Reason("sandbox", True, "no code of strangers is run")
    if why is None:
        return Reason("sandbox", True, "reward functions are run in a sandbox")
    return Reason("sandbox", False, f"reward functions need a sandbox: {why}", "Docker, or bubblewrap")


def _jobs(rules: Rules, profile: LoadedProfile, fleet: FleetSnapshot) -> Reason:
    """Offers that hold a place count like jobs: each may become one at any moment."""
    taken = len({hold.key for hold in fleet.holds})
    if rules.max_jobs is None:
        return Reason("jobs", True, f"{taken} jobs and held offers; no limit")
    if taken < rules.max_jobs:
        return Reason("jobs", True, f"{taken} of {rules.max_jobs} jobs and held offers")
    text = f"all {rules.max_jobs} places for jobs are taken by {taken}"
    return Reason("jobs", False, text, f"rules.max_jobs of {taken + 1}, or a job that ends")


def _blackout(rules: Rules, window: tuple[float, float]) -> Reason:
    start, end = window
    closed = next((one for one in rules.blackout if one.touches(start, end)), None)
    if closed is None:
        return Reason("blackout", True, f"{len(rules.blackout)} blackouts, none in the way")
    text = f"it would run for {show_seconds(end - start)}, into the blackout {closed} UTC"
    return Reason("blackout", False, text, "an offer at another time, or another rules.blackout")


def _success(rules: Rules, chances: Chances) -> Reason:
    found, least = chances.success, rules.min_success
    text = f"the chance of success is {found:.0%}, the least is {least:.0%}"
    if found >= least:
        return Reason("success", True, text)
    return Reason("success", False, text, f"rules.min_success of {below(found)}, or more jobs that succeed")


def _experience(ask: Ask, rules: Rules, history: History) -> Iterator[Reason]:
    asked = [
        (name, one.published)
        for name, one in rules.experience.items()
        if matches(one.when, ask.task_type, ask.model)
    ]
    if not asked:
        yield Reason("experience", True, "no experience is asked for")
    done = history.published(ask.task_type)
    for name, least in asked:
        text = f"{done} of {least} {WORD_OF[ask.task_type]} jobs published that {name} asks for"
        way = "" if done >= least else f"{least - done} more published, or another rules.experience.{name}"
        yield Reason("experience", done >= least, text, way)
