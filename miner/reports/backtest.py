"""What other policies would have done with the offers of a report's time."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from core.domain.hardware import Hardware
from core.profile.resolve import LoadedProfile
from miner.offers.backtest.replay import Backtest, ReplayedOffer
from miner.offers.history import job_outcomes
from miner.offers.past_offers import stored_offers
from miner.offers.policies.load import LoadedPolicy
from miner.reports.periods import ReportPeriod

#: The newest so many: a decision takes some milliseconds, and each policy decides about all.
MAX_OFFERS = 500


def backtest_policies(
    connection: sqlite3.Connection,
    period: ReportPeriod,
    policies: Sequence[LoadedPolicy],
    profile: LoadedProfile,
    hardware: Hardware,
) -> list[dict[str, Any]]:
    """Replay the offers against each policy; first what was decided. All count by the first one's terms."""
    stored = stored_offers(connection, since=period.begins_at)
    stored = [offer for offer in stored if offer.received_at < period.ends_at][-MAX_OFFERS:]
    if not stored:
        return []
    outcomes = job_outcomes(connection, period.ends_at)
    test = Backtest([offer.historical for offer in stored], profile, hardware, policies[0].terms, outcomes)
    decided = [ReplayedOffer(offer.historical, offer.decision, offer.decision.value) for offer in stored]
    runs = [test.summarize("as decided", decided), *(test.run(policy.name, policy) for policy in policies)]
    return [
        {
            "name": run.summary.name,
            "offers": run.summary.offers,
            "accepted": run.summary.accepted,
            "points": run.summary.points,
            "points_per_gpu_hour": run.summary.per_fleet_hour,
        }
        for run in runs
    ]
