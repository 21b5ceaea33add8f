"""Replay past offers against the policy in force and against a changed one, in the child process."""

from __future__ import annotations

from pathlib import Path

from core.profile.resolve import LoadedProfile
from miner.api.offers import BacktestComparison, ChangedAnswer
from miner.config_files.what_if import BacktestOrder, TermsInForce
from miner.offers.backtest.replay import Backtest, DecisionChange, decision_changes
from miner.offers.history import JobOutcome, job_outcomes
from miner.offers.past_offers import StoredOffer, stored_offers
from miner.offers.policies.load import LoadedPolicy
from miner.offers.views import backtest_figures
from miner.store.database import open_store

#: The newest offers: 10,000 take 10 to 20 seconds and 280 MB.
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
    ) -> BacktestComparison:
        """Return both policies' figures, and the offers that they answer differently."""
        offers = [stored.historical for stored in self.stored]
        test = Backtest(offers, profile, terms.hardware, before.terms, self.outcomes)
        runs = test.run("now", before), test.run("changed", after)
        changes = decision_changes(*runs)
        return BacktestComparison(
            offers=len(offers),
            is_limited=len(offers) >= self._most,
            policy=before.name,
            profile=profile.name,
            gpus=str(terms.hardware.gpus),
            before=backtest_figures(runs[0]),
            after=backtest_figures(runs[1]),
            changed=len(changes),
            changes=[_changed_answer(change) for change in reversed(changes[-MAX_CHANGES:])],
        )


def backtest_changes(order: BacktestOrder) -> BacktestComparison:
    """Carry out an order: the policy in force against the same with other values."""
    policy = order.terms.loaded_policy()
    changed = policy.with_overrides(order.changes)
    past = PastOffers(Path(order.store_dir), order.since, order.now)
    return past.compare(order.terms, order.terms.loaded_profile(), policy, changed)


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
