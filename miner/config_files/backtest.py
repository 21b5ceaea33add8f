"""Replay past offers against the policy in force and against a changed one, in the child process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.profile.resolve import LoadedProfile
from miner.config_files.what_if import BacktestOrder, TermsInForce
from miner.offers.backtest.replay import Backtest, BacktestRun, DecisionChange, decision_changes
from miner.offers.history import JobOutcome, job_outcomes
from miner.offers.past_offers import StoredOffer, stored_offers
from miner.offers.policies.load import LoadedPolicy
from miner.offers.views import backtest_as_json
from miner.store.database import open_store

#: The newest so many: 10,000 take 10 to 20 seconds and 280 MB.
MAX_OFFERS = 10_000
MAX_CHANGES = 200


class PastOffers:
    """The offers of some time and what has become of jobs, read from the store once."""

    def __init__(self, store_dir: Path, since: float, now: float, most: int = MAX_OFFERS) -> None:
        self._most = most
        with open_store(store_dir) as connection:
            self.stored: list[StoredOffer] = stored_offers(connection, since=since, most=most)
            self.outcomes: list[JobOutcome] = job_outcomes(connection, now)

    def compare(
        self, terms: TermsInForce, profile: LoadedProfile, before: LoadedPolicy, after: LoadedPolicy
    ) -> dict[str, Any]:
        """Return both policies' figures, and the offers that they answer differently."""
        offers = [one.historical for one in self.stored]
        test = Backtest(offers, profile, terms.hardware, before.terms, self.outcomes)
        runs = test.run("now", before), test.run("changed", after)
        changes = decision_changes(*runs)
        return {
            "offers": len(offers),
            "is_limited": len(offers) >= self._most,
            "policy": before.name,
            "profile": profile.name,
            "gpus": str(terms.hardware.gpus),
            "before": _figures(runs[0]),
            "after": _figures(runs[1]),
            "changed": len(changes),
            "changes": [_change(one) for one in _newest(changes)],
        }


def backtest_changes(order: BacktestOrder) -> dict[str, Any]:
    """Carry out an order: what would other values in the policy in force have done?"""
    policy = order.terms.loaded_policy()
    changed = policy.with_overrides(order.changes)
    past = PastOffers(Path(order.store_dir), order.since, order.now)
    return past.compare(order.terms, order.terms.loaded_profile(), policy, changed)


def _figures(run: BacktestRun) -> dict[str, Any]:
    return {name: value for name, value in backtest_as_json(run).items() if name not in ("answers", "policy")}


def _newest(changes: Sequence[DecisionChange]) -> list[DecisionChange]:
    return list(reversed(changes[-MAX_CHANGES:]))


def _change(one: DecisionChange) -> dict[str, Any]:
    past = one.after.historical
    return {
        "at": past.at,
        "task_id": past.offer.task_id,
        "task_type": past.offer.task_type.value,
        "model": past.offer.model,
        "hours": past.offer.hours_to_complete,
        "accepted": one.after.decision.accepted,
        "why": one.why,
        "points": one.after.value.points if one.after.value else None,
    }
