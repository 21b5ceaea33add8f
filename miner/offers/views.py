"""Past offers, their decisions and backtests as records, for commands and the operator's port."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from core.domain.decisions import Decision
from core.domain.wire import MinerTaskOffer
from miner.api.offers import (
    BacktestAnswer,
    BacktestFigures,
    DecisionDetails,
    DecisionFactor,
    DecisionPlacement,
    DecisionPlan,
    DecisionReason,
    DecisionValue,
    OfferDetails,
    OfferSummary,
    PolicyBacktest,
)
from miner.offers.past_offers import StoredOffer

if TYPE_CHECKING:
    from miner.offers.backtest.replay import BacktestRun

#: The setting that would let an offer pass: `rules.hours.instruct of 12`.
_SETTING = re.compile(r"\b((?:rules|score|fitting)(?:\.[a-z0-9_-]+)+) of (-?\d+(?:\.\d+)?[a-z]?)")


def offer_summary(stored: StoredOffer) -> OfferSummary:
    """Return the offer as it came, the answer and the outcome."""
    decision = stored.decision
    failed = [reason.text for reason in decision.failed]
    return OfferSummary(
        id=None if stored.is_start else stored.number,
        received_at=stored.received_at,
        decided_at=stored.decided_at,
        validator=stored.validator,
        task_id=stored.offer.task_id,
        task_type=stored.offer.task_type,
        model=stored.offer.model,
        params=stored.offer.model_params_count,
        hours=stored.offer.hours_to_complete,
        ds_size=stored.offer.ds_size,
        times_seen=stored.times_seen,
        accepted=decision.accepted,
        message=decision.message,
        score=decision.score,
        points=decision.value.points if decision.value else None,
        why="; ".join(failed) or None,
        became=stored.outcome,
        policy=decision.policy,
        policy_hash=decision.policy_hash,
    )


def offer_details(stored: StoredOffer) -> OfferDetails:
    """Return every rule, every factor, and what would have to change."""
    return OfferDetails(
        **dict(offer_summary(stored)),
        is_start=stored.is_start,
        explanation=decision_details(stored.offer, stored.decision),
        overrides=settings_to_accept(stored.decision),
    )


def decision_details(offer: MinerTaskOffer, decision: Decision) -> DecisionDetails:
    placement, value, plan = decision.placement, decision.value, decision.plan
    return DecisionDetails(
        offer=offer,
        accepted=decision.accepted,
        message=decision.message,
        policy=decision.policy,
        policy_hash=decision.policy_hash,
        profile=decision.profile,
        profile_hash=decision.profile_hash,
        score=decision.score,
        threshold=decision.threshold,
        reasons=[DecisionReason.model_validate(reason) for reason in decision.reasons],
        factors={name: DecisionFactor.model_validate(factor) for name, factor in decision.factors.items()},
        plan=plan and DecisionPlan.model_validate(plan),
        placement=placement and DecisionPlacement.model_validate(placement),
        value=value and DecisionValue.model_validate(value),
    )


def settings_to_accept(decision: Decision) -> dict[str, str]:
    """Return what a policy would have to say for the failed rules to pass, where its values would do."""
    settings = [_SETTING.findall(reason.way) for reason in decision.failed]
    return {key: value for pairs in settings for key, value in pairs}


def policy_backtest(run: BacktestRun) -> PolicyBacktest:
    """Return the figures and every answer."""
    return PolicyBacktest(
        **dict(backtest_figures(run)),
        policy=run.summary.name,
        answers=[
            BacktestAnswer(
                task_id=entry.historical.offer.task_id,
                at=entry.historical.at,
                accepted=entry.decision.accepted,
                score=entry.decision.score,
                points=entry.value.points if entry.value else None,
                gpus=list(entry.decision.placement.gpus) if entry.decision.placement else None,
                failed=[reason.rule for reason in entry.decision.failed],
            )
            for entry in run.entries
        ],
    )


def backtest_figures(run: BacktestRun) -> BacktestFigures:
    summary = run.summary
    return BacktestFigures(
        offers=summary.offers,
        accepted=summary.accepted,
        refused=summary.refused,
        fleet_gpu_hours=summary.fleet_hours,
        held_gpu_hours=summary.held_hours,
        occupancy=summary.mean_occupancy,
        occupancy_over_time=list(summary.occupancy),
        expected_points=summary.points,
        points_per_fleet_gpu_hour=summary.per_fleet_hour,
        points_per_held_gpu_hour=summary.per_held_hour,
        known=summary.outcomes,
        realised_points=summary.realised,
    )
