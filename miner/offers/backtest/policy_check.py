"""Find what looks wrong in a valid policy: contradictions, and how many representative offers it would
accept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from core.domain.hardware import Hardware
from core.domain.selectors import SizeBand
from core.domain.tasks import OFFERED_TASKS, TaskType
from core.domain.wire import MinerTaskOffer
from core.profile.explain import SIZES, ProfileFinding, ProfileFindingLevel
from core.profile.resolve import LoadedProfile
from miner.offers.backtest.replay import idle_fleet
from miner.offers.decide import decide
from miner.offers.history import SuccessHistory
from miner.offers.policies.load import LoadedPolicy
from miner.offers.policies.schema import Policy, PolicyRules, by_kind
from miner.offers.policies.yaml_types import BlackoutHours

#: A Monday, from which blackouts of the week are counted.
_MONDAY = 4 * 86_400.0
#: Hours of the representative offers: the middle of what validators send.
_HOURS, _IMAGE_HOURS = 3.0, 2.0
_IMAGE_MODELS = ("stabilityai/stable-diffusion-xl-base-1.0", "black-forest-labs/FLUX.1-dev")


class AcceptanceCount(NamedTuple):
    """Representative offers of one task type, on idle GPUs at a quiet hour."""

    task: str
    accepted: int
    asked: int
    #: The rule that refuses most of the others.
    mostly: str


def policy_findings(policy: LoadedPolicy) -> list[ProfileFinding]:
    """Return the contradictions that can be seen without any offer."""
    terms = policy.terms
    return [
        *_score_findings(terms),
        *_hours_findings(terms.rules),
        *_blackout_findings(terms.rules.blackout),
        *_band_findings("score.size", list(terms.score.size)),
        *_band_findings("success.size", list(terms.success.size)),
    ]


def acceptance_counts(
    policy: LoadedPolicy, profile: LoadedProfile, hardware: Hardware
) -> list[AcceptanceCount]:
    """Count the offers of every size that it would accept, by task type."""
    fleet, now, counts = idle_fleet(hardware), _quiet_hour(policy.terms.rules.blackout), []
    for task_type in OFFERED_TASKS:
        offers = list(_representative(task_type))
        decisions = [decide(offer, now, fleet, SuccessHistory(), policy, profile) for offer in offers]
        failed = Counter(decision.failed[0].rule for decision in decisions if decision.failed)
        mostly = failed.most_common(1)[0][0] if failed else ""
        accepted = sum(decision.accepted for decision in decisions)
        counts.append(AcceptanceCount(task_type.word, accepted, len(offers), mostly))
    return counts


def _error(path: str, text: str) -> ProfileFinding:
    return ProfileFinding(ProfileFindingLevel.ERROR, path, text)


def _warning(path: str, text: str) -> ProfileFinding:
    return ProfileFinding(ProfileFindingLevel.WARNING, path, text)


def _score_findings(terms: Policy) -> Iterator[ProfileFinding]:
    weights, threshold = terms.score.weights.model_dump(), terms.score.threshold
    total = sum(weights.values())
    if threshold is not None and threshold >= total:
        yield _error("score.threshold", f"{threshold:g} cannot be reached: the weights add up to {total:g}")
    elif abs(total - 1) > 0.001:
        yield _warning("score.weights", f"add up to {total:g}, not to 1: scores are hard to compare")
    if not weights["task"] or threshold is None:
        return
    for task_type in terms.rules.tasks or OFFERED_TASKS:
        if task_type.is_text and by_kind(terms.score.task, (task_type.word,), -1) < 0:
            yield _warning("score.task", f"{task_type.word} is not listed and counts 0")


def _hours_findings(rules: PolicyRules) -> Iterator[ProfileFinding]:
    for task_type in OFFERED_TASKS:
        word = task_type.word
        if rules.tasks is not None and task_type not in rules.tasks and word in rules.hours:
            yield _warning(f"rules.hours.{word}", f"never asked: {word} is not in rules.tasks")
    for word, limit in rules.hours.items():
        if limit.hours < rules.min_hours:
            text = f"{limit} is below rules.min_hours of {rules.min_hours:g}"
            yield _error(f"rules.hours.{word}", text)


def _blackout_findings(blackouts: Sequence[BlackoutHours]) -> Iterator[ProfileFinding]:
    if blackouts and _quiet_hour(blackouts) == _MONDAY and _is_blacked_out(blackouts, _MONDAY):
        yield _error("rules.blackout", "covers the whole week: nothing is ever accepted")


def _band_findings(path: str, bands: Sequence[SizeBand]) -> Iterator[ProfileFinding]:
    for index, band in enumerate(bands):
        earlier = next((other for other in bands[:index] if band.low in other), None)
        if earlier is not None:
            text = f"begins within {earlier}, which stands before it and counts there"
            yield _warning(f"{path}.{band}", text)


def _quiet_hour(blackouts: Sequence[BlackoutHours]) -> float:
    """Return when the first six hours without a blackout begin; Monday if there are none."""
    hours = (_MONDAY + 3600 * hour for hour in range(7 * 24))
    return next((at for at in hours if not _is_blacked_out(blackouts, at, 6)), _MONDAY)


def _is_blacked_out(blackouts: Sequence[BlackoutHours], at: float, hours: float = 1) -> bool:
    return any(blackout.touches(at, at + hours * 3600) for blackout in blackouts)


def _representative(task_type: TaskType) -> Iterator[MinerTaskOffer]:
    is_image = not task_type.is_text
    models = [(name, None) for name in _IMAGE_MODELS] if is_image else SIZES
    for name, params in models:
        yield MinerTaskOffer(
            model=name,
            hours_to_complete=_IMAGE_HOURS if is_image else _HOURS,
            task_id="check",
            task_type=task_type,
            ds_size=30 if is_image else None,
            model_params_count=params,
        )
