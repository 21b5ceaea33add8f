from __future__ import annotations

import itertools
from collections.abc import Sequence

from benchmarks import policy
from core.domain.decisions import Decision
from core.domain.hardware import Hardware, parse_gpus
from core.domain.keys import Placement
from core.profile.resolve import load_profile
from miner.offers.backtest.replay import ReplayedOffer
from miner.offers.backtest.synthetic import synthetic_offers
from miner.offers.past_offers import HistoricalOffer
from tests.miner.offers.builders import offer


def overlapping(taken: Sequence[ReplayedOffer]) -> int:
    """Pairs of tasks that hold one GPU at one time; written without the benchmark's own way of counting."""
    placements = [replayed.decision.placement for replayed in taken]
    return sum(
        bool(set(this.gpus) & set(other.gpus))
        and this.starts_at < other.ends_at
        and other.starts_at < this.ends_at
        for this, other in itertools.combinations(placements, 2)
    )


def entry(gpus: str, start: float, end: float) -> ReplayedOffer:
    decision = Decision(True, "", "", "", placement=Placement(tuple(gpus), start, end))
    return ReplayedOffer(HistoricalOffer(start, offer()), decision, None)


def test_windows_that_share_a_gpu_are_counted() -> None:
    apart = [entry("01", 0, 10), entry("2", 5, 15), entry("0", 10, 20)]
    assert policy.doubly_booked(apart) == overlapping(apart) == 0
    clash = [*apart, entry("1", 9, 11)]
    assert policy.doubly_booked(clash) == overlapping(clash) == 1


def test_a_week_of_the_stand_in_is_one_llama_at_a_time_on_the_whole_host() -> None:
    offers = list(synthetic_offers(1, days=2, per_day=60))
    hardware = Hardware(gpus=parse_gpus("4xH100"))
    week = policy._reference(offers, load_profile("steady"), hardware)
    assert 0 < week.accepted <= sum("llama" in past.offer.model.lower() for past in offers)
    assert week.gpu_hours <= 4 * (2 * 24 + 6)


def test_what_is_accepted_is_finished_on_its_own_gpus_within_its_window() -> None:
    offers = list(synthetic_offers(5, days=2, per_day=60))
    hardware = Hardware(gpus=parse_gpus("4xH100"))
    week = policy._ours(offers, "h100x4", load_profile("h100x4-strategy"), hardware)
    assert week.accepted > 20
    assert (week.doubly_booked, week.unfinished) == (0, 0)
    assert week.points > 0
    assert week.gpu_hours <= 4 * (2 * 24 + 6)
