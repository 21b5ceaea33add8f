"""Replay past offers against the policy in force and against a changed one, in the child process."""

from __future__ import annotations

from pathlib import Path

from miner.api.offers import BacktestComparison, ChangedAnswer
from miner.config_files.what_if import BacktestOrder
from miner.offers.backtest.replay import Backtest, DecisionChange, PastOffers, decision_changes
from miner.offers.past_offers import OfferFilter
from miner.offers.policies.load import LoadedPolicy
from miner.offers.views import backtest_figures
from miner.store.database import open_store

#: The newest offers: 10,000 take 10 to 20 seconds and 280 MB.
MAX_OFFERS = 10_000
MAX_CHANGES = 200


def read_past_offers(store_dir: str, since: float, now: float, most: int = MAX_OFFERS) -> PastOffers:
    with open_store(Path(store_dir)) as connection:
        return PastOffers.read(connection, OfferFilter(since=since, most=most), now)


def compare_policies(
    test: Backtest, before: LoadedPolicy, after: LoadedPolicy, most: int = MAX_OFFERS
) -> BacktestComparison:
    """Return both policies' figures, and the offers that they answer differently."""
    runs = test.run("now", before), test.run("changed", after)
    changes = decision_changes(*runs)
    return BacktestComparison(
        offers=len(test.offers),
        is_limited=len(test.offers) >= most,
        policy=before.name,
        profile=test.profile.name,
        gpus=str(test.hardware.gpus),
        before=backtest_figures(runs[0]),
        after=backtest_figures(runs[1]),
        changed=len(changes),
        changes=[_changed_answer(change) for change in reversed(changes[-MAX_CHANGES:])],
    )


def backtest_changes(order: BacktestOrder) -> BacktestComparison:
    """Carry out an order: the policy in force against the same with other values."""
    policy = order.terms.loaded_policy()
    changed = policy.with_overrides(order.changes)
    past = read_past_offers(order.store_dir, order.since, order.now)
    test = past.backtest(order.terms.loaded_profile(), order.terms.hardware, policy.terms)
    return compare_policies(test, policy, changed)


def _changed_answer(change: DecisionChange) -> ChangedAnswer:
    past = change.after.historical
    return ChangedAnswer(
        at=past.at,
        task_id=past.offer.task_id,
        task_type=past.offer.task_type,
        model=past.offer.model,
        hours=past.offer.hours_to_complete,
        accepted=change.after.decision.accepted,
        why=change.why,
        points=change.after.value.points if change.after.value else None,
    )
