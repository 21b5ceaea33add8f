"""What looks wrong in a policy that can be read: what can never happen, and what nothing would pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from core.hardware import Hardware
from core.profile.explain import SIZES, Finding, Level
from core.profile.load import LoadedProfile
from core.profile.words import SizeBand
from core.tasks import TaskType
from core.wire import MinerTaskOffer
from miner.offers.decide import decide
from miner.offers.history import History
from miner.offers.policies.load import LoadedPolicy
from miner.offers.policies.schema import Policy, by_kind
from miner.offers.policies.words import WORD_OF, Stretch
from miner.offers.replay import idle_fleet

#: A Monday; blackouts of the week are looked at from there.
_MONDAY = 4 * 86_400.0
_WEEK = 7 * 86_400
#: Hours of the representative offers: the middle of what validators send.
_HOURS, _IMAGE_HOURS = 3.0, 2.0
_IMAGES = ("stabilityai/stable-diffusion-xl-base-1.0", "black-forest-labs/FLUX.1-dev")


class Tally(NamedTuple):
    """Representative offers of one task type, on idle GPUs at a quiet hour."""

    task: str
    accepted: int
    asked: int
    #: The rule that refuses most of the others.
    mostly: str


def findings(policy: LoadedPolicy) -> list[Finding]:
    """Contradictions that need no offer to be seen."""
    terms = policy.terms
    return [
        Finding(level, path, text)
        for level, path, text in (
            *_score(terms),
            *_hours(terms),
            *_blackout(terms.rules.blackout),
            *_bands("score.size", list(terms.score.size)),
            *_bands("success.size", list(terms.success.size)),
        )
    ]


def tallies(policy: LoadedPolicy, profile: LoadedProfile, hardware: Hardware) -> list[Tally]:
    """How many offers of every size it would take of each task type."""
    fleet, now = idle_fleet(hardware), _quiet_hour(policy.terms.rules.blackout)
    found = []
    for task_type in TaskType:
        offers = list(_representative(task_type))
        decisions = [decide(offer, now, fleet, History(), policy, profile) for offer in offers]
        failed = Counter(one.failed[0].rule for one in decisions if one.failed)
        mostly = failed.most_common(1)[0][0] if failed else ""
        accepted = sum(one.accepted for one in decisions)
        found.append(Tally(WORD_OF[task_type], accepted, len(offers), mostly))
    return found


_Found = tuple[Level, str, str]


def _score(terms: Policy) -> Iterator[_Found]:
    weights = terms.score.weights.model_dump()
    most, threshold = sum(weights.values()), terms.score.threshold
    if threshold is not None and threshold >= most:
        text = f"{threshold:g} can't be passed: the weights add up to {most:g}"
        yield Level.ERROR, "score.threshold", text
    elif abs(most - 1) > 0.001:
        yield Level.WARNING, "score.weights", f"add up to {most:g}, not to 1: scores are hard to compare"
    if not weights["task"] or threshold is None:
        return
    for task_type in terms.rules.tasks or TaskType:
        if task_type is not TaskType.IMAGE and by_kind(terms.score.task, (WORD_OF[task_type],), -1) < 0:
            yield Level.WARNING, "score.task", f"{WORD_OF[task_type]} is not listed and counts 0"


def _hours(terms: Policy) -> Iterator[_Found]:
    rules = terms.rules
    for task_type in TaskType:
        word = WORD_OF[task_type]
        if rules.tasks is not None and task_type not in rules.tasks and word in rules.hours:
            yield Level.WARNING, f"rules.hours.{word}", f"never asked: {word} is not in rules.tasks"
    for word, limit in rules.hours.items():
        if limit.hours < rules.min_hours:
            text = f"{limit} is below rules.min_hours of {rules.min_hours:g}"
            yield Level.ERROR, f"rules.hours.{word}", text


def _blackout(stretches: Sequence[Stretch]) -> Iterator[_Found]:
    if stretches and _quiet_hour(stretches) == _MONDAY and _touched(stretches, _MONDAY):
        yield Level.ERROR, "rules.blackout", "covers the whole week: nothing is ever accepted"


def _bands(path: str, bands: Sequence[SizeBand]) -> Iterator[_Found]:
    for index, band in enumerate(bands):
        earlier = next((one for one in bands[:index] if band.low in one), None)
        if earlier is not None:
            text = f"begins within {earlier}, which stands before it and counts there"
            yield Level.WARNING, f"{path}.{band}", text


def _quiet_hour(stretches: Sequence[Stretch]) -> float:
    """The middle of the first six hours that no blackout touches; Monday if there are none."""
    found = (at for hour in range(7 * 24) if not _touched(stretches, at := _MONDAY + 3600 * hour, 6))
    return next(found, _MONDAY)


def _touched(stretches: Sequence[Stretch], at: float, hours: float = 1) -> bool:
    return any(one.touches(at, at + hours * 3600) for one in stretches)


def _representative(task_type: TaskType) -> Iterator[MinerTaskOffer]:
    if task_type is TaskType.IMAGE:
        for name in _IMAGES:
            yield MinerTaskOffer(
                model=name, hours_to_complete=_IMAGE_HOURS, task_id="check", task_type=task_type, ds_size=30
            )
        return
    for name, params in SIZES:
        yield MinerTaskOffer(
            model=name,
            hours_to_complete=_HOURS,
            task_id="check",
            task_type=task_type,
            model_params_count=params,
        )
