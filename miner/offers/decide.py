"""Decide about an offer. Pure: same offer, time, fleet, history, policy and profile, same decision.

Never raises for an offer that could be read: whatever is odd about it becomes a reason. All rules are
checked, not only up to the first that fails, so that a stored decision can be argued with as a whole.
Refusals are cached: with nothing changed, one holds for all equal offers of the next minute, and is
stored once. An acceptance is never reused.
"""

from __future__ import annotations

import math
from operator import is_

from core.domain.decisions import Decision
from core.domain.tasks import ImageModelType
from core.domain.wire import MinerTaskOffer
from core.profile.resolve import LoadedProfile
from miner.fleet.base import FleetSnapshot
from miner.offers.fit import FitResult, fit_offer
from miner.offers.history import SuccessHistory
from miner.offers.parsed_offer import ParsedOffer, parse_offer
from miner.offers.policies.load import LoadedPolicy
from miner.offers.rules import RuleInputs, check_rules
from miner.offers.scoring import expected_value, score_factors

HASH_DIGITS = 16
#: Ten kilobytes each; names are no part of the key, so only new shapes make it grow.
MAX_CACHED_REFUSALS = 512
#: A refusal is as good as new for so long: a validator asks again for the same task after 15 minutes.
CACHE_SECONDS = 60.0


def decide(
    offer: MinerTaskOffer,
    now: float,
    fleet: FleetSnapshot,
    history: SuccessHistory,
    policy: LoadedPolicy,
    profile: LoadedProfile,
    *,
    image_type: ImageModelType | None = None,
) -> Decision:
    """`fleet` without what this task holds itself; `image_type` as a start names it."""
    parsed = parse_offer(offer, image_type, policy.terms.rules.models_denied)
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
    fit = fit_offer(offer, now, fleet, terms.fitting, profile)
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
    """As they are held; without a place, as planned; without a plan, the whole time on one GPU."""
    if fit.placement is not None:
        seconds = fit.placement.ends_at - fit.placement.starts_at
        return len(fit.placement.gpus) * seconds / 3600
    if fit.plan is not None and fit.plan.total_s > 0:
        return fit.plan.gpus * fit.plan.total_s / 3600
    return max(offer.hours, 0.0)


class CachedDecision:
    """A decision, and its row in the store once that is on disk: equal refusals share the row."""

    __slots__ = ("decision", "decision_id")

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.decision_id: int | None = None


class DecisionCache:
    """Refusals by offer, for as long as nothing that they depend on has changed.

    The only cache on the way of an offer: a refusal that is found here needs neither a plan nor a row of its
    own, which is most of the cost of an offer.
    """

    def __init__(self) -> None:
        self._state: tuple[object, ...] = ()
        self._version = -1
        #: Since when refusals of this state are cached.
        self._since = -math.inf
        self._refusals: dict[ParsedOffer, CachedDecision] = {}

    def get_or_decide(
        self,
        offer: ParsedOffer,
        now: float,
        fleet: FleetSnapshot,
        history: SuccessHistory,
        policy: LoadedPolicy,
        profile: LoadedProfile,
    ) -> CachedDecision:
        # By identity: what these are made of never changes in place. The history does, and counts.
        state = (
            fleet.reservations,
            fleet.gpus,
            fleet.hardware,
            fleet.problem,
            fleet.ability,
            policy,
            profile,
            history,
        )
        if not (
            0.0 <= now - self._since < CACHE_SECONDS
            and self._version == history.version
            and all(map(is_, state, self._state))
        ):
            self._state, self._version, self._since = state, history.version, now
            self._refusals.clear()
        cached = self._refusals.get(offer)
        if cached is None:
            cached = CachedDecision(decide_parsed(offer, now, fleet, history, policy, profile))
            if not cached.decision.accepted:
                if len(self._refusals) >= MAX_CACHED_REFUSALS:
                    del self._refusals[next(iter(self._refusals))]
                self._refusals[offer] = cached
        return cached
