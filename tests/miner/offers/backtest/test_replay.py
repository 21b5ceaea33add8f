from __future__ import annotations

import pytest

from core.domain.decisions import Decision, ExpectedValue, Reason
from core.domain.hardware import Hardware, parse_gpus
from core.domain.keys import Placement
from miner.api.offers import OfferOutcome
from miner.offers.backtest.replay import (
    Backtest,
    ReplayedOffer,
    ReplaySummary,
    decision_changes,
    idle_fleet,
    replay,
    summarize_replay,
)
from miner.offers.backtest.synthetic import synthetic_offers
from miner.offers.past_offers import HistoricalOffer
from miner.offers.policies.schema import ValueTerms
from tests.benchmarks.test_policy import overlapping
from tests.miner.offers.builders import HOUR, NOON, offer, outcome, policy, profile

FOUR = Hardware(gpus=parse_gpus("4xH100"))


def played(*offers: HistoricalOffer, plan_by: str = "all", **how: object) -> list[ReplayedOffer]:
    return replay(offers, policy(), profile(plan_by), FOUR, **how)


def accepted(entries: list[ReplayedOffer]) -> list[bool]:
    return [entry.decision.accepted for entry in entries]


def at(hours: float, outcome: OfferOutcome | None = None, **changes: object) -> HistoricalOffer:
    return HistoricalOffer(NOON + hours * HOUR, offer(task_id=f"t{hours * 10:.0f}", **changes), None, outcome)


def test_an_accepted_offer_holds_its_gpus_until_its_window_ends() -> None:
    first, second, third = played(at(0), at(0.1), at(2.9))
    assert accepted([first, second, third]) == [True, False, True]
    assert first.decision.placement.ends_at < NOON + 2.9 * HOUR


def test_an_offer_whose_start_never_came_frees_its_gpus_soon() -> None:
    assert accepted(played(at(0, OfferOutcome.LAPSED), at(0.1), at(0.3))) == [True, True, False]


def test_history_grows_as_it_did_and_knows_nothing_of_the_future() -> None:
    ended = [outcome(number, published=False, ended_at=NOON + HOUR) for number in range(50)]
    before, after = played(at(0), at(9), outcomes=ended)

    def success(decision: Decision) -> float:
        return decision.factors["success"].value

    assert success(before.decision) == 0.95
    assert success(after.decision) < 0.3


def test_days_of_offers_never_hold_a_gpu_twice() -> None:
    for plan_by in ("h100x4-strategy", "steady"):
        entries = played(*synthetic_offers(4, days=2, per_day=80), plan_by=plan_by)
        taken = [entry for entry in entries if entry.decision.accepted]
        assert len(taken) > 20
        assert overlapping(taken) == 0


def test_gpus_of_an_idle_fleet_are_linked_as_such_gpus_are() -> None:
    def links(gpus: str) -> list[frozenset[str]]:
        return [gpu.linked for gpu in idle_fleet(Hardware(gpus=parse_gpus(gpus))).gpus]

    assert links("3xH100") == [frozenset("12"), frozenset("02"), frozenset("01")]
    assert links("3xA100-PCIE-40GB") == [frozenset("1"), frozenset("0"), frozenset()]
    assert links("2xL40S") == [frozenset(), frozenset()]


# The summary

TERMS = ValueTerms(win_points=3, penalty=1)


def entry(
    at: float, hours: float = 0, gpus: int = 1, outcome: OfferOutcome | None = None, failed: str = ""
) -> ReplayedOffer:
    """Accepted for some hours, or refused."""
    start = NOON + at * HOUR
    place = Placement(tuple("0123"[:gpus]), start, start + hours * HOUR) if hours else None
    reasons = (Reason(failed, False, "no"),) if failed else ()
    value = ExpectedValue(10.0, 0.9, 0.2, 0.1, 4.0, hours * gpus) if hours else None
    decision = Decision(not failed, "", "p", "h", reasons, placement=place, value=value)
    return ReplayedOffer(HistoricalOffer(start, offer(), None, outcome), decision, value)


def summary(*entries: ReplayedOffer) -> ReplaySummary:
    return summarize_replay("mine", entries, 4, TERMS, intervals=10)


def test_offers_are_counted_by_their_answers_and_the_first_rule_that_failed() -> None:
    totals = summary(entry(0, 1), entry(1, failed="hours"), entry(2, failed="hours"), entry(3, failed="gpus"))
    assert (totals.offers, totals.accepted, totals.refused) == (4, 1, {"hours": 2, "gpus": 1})


def test_occupancy_is_the_share_of_gpus_held_in_each_interval() -> None:
    totals = summary(entry(0, 5, gpus=2), entry(2, 1, gpus=2), entry(10, failed="gpus"))
    assert totals.occupancy == pytest.approx((0.5, 0.5, 1.0, 0.5, 0.5, 0, 0, 0, 0, 0))
    assert totals.held_hours == pytest.approx(12)
    assert totals.fleet_hours == 40
    assert totals.mean_occupancy == pytest.approx(0.3)


def test_a_job_that_reaches_beyond_the_last_offer_counts_for_its_part() -> None:
    totals = summary(entry(0, failed="x"), entry(8, 8, gpus=4), entry(10, failed="x"))
    assert totals.points == pytest.approx(4.0 * 2 / 8)
    assert totals.held_hours == pytest.approx(8)
    assert totals.per_held_hour == pytest.approx(1 / 8)
    assert totals.per_fleet_hour == pytest.approx(1 / 40)


def test_known_outcomes_are_counted_and_valued() -> None:
    totals = summary(
        entry(0, 1, outcome=OfferOutcome.PUBLISHED),
        entry(1, 1, outcome=OfferOutcome.FAILED),
        entry(2, 1, outcome=OfferOutcome.LAPSED),
        entry(3, 1, outcome=OfferOutcome.OPEN),
        entry(4, failed="x", outcome=OfferOutcome.PUBLISHED),
    )
    assert totals.outcomes == {
        OfferOutcome.PUBLISHED: 1,
        OfferOutcome.FAILED: 1,
        OfferOutcome.LAPSED: 1,
        OfferOutcome.OPEN: 1,
    }
    assert totals.realised == pytest.approx(10 * (3 * 0.2 - 0.1) - 10)
    assert totals.points == pytest.approx(3 * 4.0)  # nothing of the one that never started
    assert summary(entry(0, 1), entry(1, 1)).realised is None


def test_no_offer_or_a_single_one_is_summarized_too() -> None:
    assert (
        summary().offers,
        summary().mean_occupancy,
        summary().per_fleet_hour,
        summary().per_held_hour,
    ) == (0, 0, 0, 0)
    assert (summary(entry(0, 1)).accepted, summary(entry(0, 1)).occupancy) == (1, ())


# Two policies compared


@pytest.fixture(scope="module")
def backtest() -> Backtest:
    offers = list(synthetic_offers(1, days=2, per_day=40))
    return Backtest(offers, profile(), FOUR, policy().terms)


def test_only_offers_that_are_decided_differently_are_changes(backtest: Backtest) -> None:
    before, same = (backtest.run("a", policy()) for _ in range(2))
    assert decision_changes(before, same) == []
    strict = backtest.run("b", policy(rules__max_hours=2))
    changes = decision_changes(before, strict)
    lost = [change for change in changes if change.before.decision.accepted]
    assert any("over the limit of 2" in change.why for change in lost)
    assert all(change.why for change in changes)
    pairs = list(zip(before.entries, strict.entries, strict=True))
    assert len(changes) == sum(first.decision.accepted != second.decision.accepted for first, second in pairs)


def test_all_are_valued_alike_so_that_their_sums_can_be_compared(backtest: Backtest) -> None:
    dreamer = policy(value__win_chance={"instruct": 1.0, "chat": 1.0, "dpo": 1.0, "grpo": 1.0, "image": 1.0})
    assert backtest.run("a", policy()).summary.points == backtest.run("b", dreamer).summary.points
