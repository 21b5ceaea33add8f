"""Past offers, their decisions and backtests as JSON, for commands and the operator's port."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from core.domain.decisions import Decision
from core.domain.wire import MinerTaskOffer
from miner.offers.past_offers import StoredOffer

if TYPE_CHECKING:
    from miner.offers.backtest.replay import BacktestRun

#: The setting that would let an offer pass: `rules.hours.instruct of 12`.
_SETTING = re.compile(r"\b((?:rules|score|fitting)(?:\.[a-z0-9_-]+)+) of (-?\d+(?:\.\d+)?[a-z]?)")


def offer_as_json(one: StoredOffer) -> dict[str, Any]:
    """Return the offer as it came, the answer and the outcome."""
    decision = one.decision
    failed = [reason.text for reason in decision.failed]
    return {
        "id": None if one.is_start else one.number,
        "received_at": one.received_at,
        "decided_at": one.decided_at,
        "validator": one.validator,
        "task_id": one.offer.task_id,
        "task_type": one.offer.task_type.value,
        "model": one.offer.model,
        "params": one.offer.model_params_count,
        "hours": one.offer.hours_to_complete,
        "ds_size": one.offer.ds_size,
        "times_seen": one.times_seen,
        "accepted": decision.accepted,
        "message": decision.message,
        "score": decision.score,
        "points": decision.value.points if decision.value else None,
        "why": "; ".join(failed) or None,
        "became": one.outcome.value,
        "policy": decision.policy,
        "policy_hash": decision.policy_hash,
    }


def decision_as_json(offer: MinerTaskOffer, decision: Decision) -> dict[str, Any]:
    """Return the decision for programs."""
    placement, value, plan = decision.placement, decision.value, decision.plan
    return {
        "offer": offer.model_dump(mode="json"),
        "accepted": decision.accepted,
        "message": decision.message,
        "policy": decision.policy,
        "policy_hash": decision.policy_hash,
        "profile": decision.profile,
        "profile_hash": decision.profile_hash,
        "score": decision.score,
        "threshold": decision.threshold,
        "reasons": [reason._asdict() for reason in decision.reasons],
        "factors": {name: factor._asdict() for name, factor in decision.factors.items()},
        "plan": plan._asdict() if plan else None,
        "placement": {
            "gpus": list(placement.gpus),
            "starts_at": placement.starts_at,
            "ends_at": placement.ends_at,
            "why": placement.why,
        }
        if placement
        else None,
        "value": {**value._asdict(), "per_gpu_hour": value.per_gpu_hour} if value else None,
    }


def settings_to_accept(decision: Decision) -> dict[str, str]:
    """Return what a policy would have to say for the failed rules to pass, where its values would do."""
    found = [_SETTING.findall(reason.way) for reason in decision.failed]
    return {key: value for each in found for key, value in each}


def backtest_as_json(run: BacktestRun) -> dict[str, Any]:
    """Return the figures and every answer, for programs."""
    one = run.summary
    return {
        "policy": one.name,
        "offers": one.offers,
        "accepted": one.accepted,
        "refused": one.refused,
        "fleet_gpu_hours": one.fleet_hours,
        "held_gpu_hours": one.held_hours,
        "occupancy": one.mean_occupancy,
        "occupancy_over_time": list(one.occupancy),
        "expected_points": one.points,
        "points_per_fleet_gpu_hour": one.per_fleet_hour,
        "points_per_held_gpu_hour": one.per_held_hour,
        "known": one.outcomes,
        "realised_points": one.realised,
        "answers": [
            {
                "task_id": entry.historical.offer.task_id,
                "at": entry.historical.at,
                "accepted": entry.decision.accepted,
                "score": entry.decision.score,
                "points": entry.value.points if entry.value else None,
                "gpus": entry.decision.placement.gpus if entry.decision.placement else None,
                "failed": [reason.rule for reason in entry.decision.failed],
            }
            for entry in run.entries
        ],
    }
