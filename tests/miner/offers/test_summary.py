from __future__ import annotations

import pytest

from miner.fleet.base import Placement
from miner.offers.decision import Decision, ExpectedValue, Reason
from miner.offers.offered import Known, Offered
from miner.offers.policies.schema import Value
from miner.offers.replay import Entry
from miner.offers.summary import Summary, summary
from tests.miner.offers.builders import HOUR, NOON, offer

TERMS = Value(win_points=3, penalty=1)


def entry(at: float, hours: float = 0, gpus: int = 1, known: Known | None = None, failed: str = "") -> Entry:
    """Accepted for some hours, or refused."""
    start = NOON + at * HOUR
    place = Placement(tuple("0123"[:gpus]), start, start + hours * HOUR) if hours else None
    reasons = (Reason(failed, False, "no"),) if failed else ()
    value = ExpectedValue(10.0, 0.9, 0.2, 0.1, 4.0, hours * gpus) if hours else None
    decision = Decision(not failed, "", "p", "h", reasons, placement=place, value=value)
    return Entry(Offered(start, offer(), None, known), decision, value)


def of(*entries: Entry) -> Summary:
    return summary("mine", entries, 4, TERMS, stretches=10)


def test_offers_are_counted_by_their_answers_and_the_first_rule_that_failed() -> None:
    found = of(entry(0, 1), entry(1, failed="hours"), entry(2, failed="hours"), entry(3, failed="gpus"))
    assert (found.offers, found.accepted, found.refused) == (4, 1, {"hours": 2, "gpus": 1})


def test_gpus_are_held_where_and_when_they_were() -> None:
    found = of(entry(0, 5, gpus=2), entry(2, 1, gpus=2), entry(10, failed="gpus"))
    assert found.occupancy == pytest.approx((0.5, 0.5, 1.0, 0.5, 0.5, 0, 0, 0, 0, 0))
    assert found.held_hours == pytest.approx(12)
    assert found.fleet_hours == 40
    assert found.mean_occupancy == pytest.approx(0.3)


def test_a_job_that_reaches_beyond_the_last_offer_counts_for_its_part() -> None:
    found = of(entry(0, failed="x"), entry(8, 8, gpus=4), entry(10, failed="x"))
    assert found.points == pytest.approx(4.0 * 2 / 8)
    assert found.held_hours == pytest.approx(8)
    assert found.per_held_hour == pytest.approx(1 / 8)
    assert found.per_fleet_hour == pytest.approx(1 / 40)


def test_what_is_known_is_counted_and_priced() -> None:
    found = of(
        entry(0, 1, known=Known.PUBLISHED),
        entry(1, 1, known=Known.FAILED),
        entry(2, 1, known=Known.LAPSED),
        entry(3, 1, known=Known.OPEN),
        entry(4, failed="x", known=Known.PUBLISHED),
    )
    assert found.known == {Known.PUBLISHED: 1, Known.FAILED: 1, Known.LAPSED: 1, Known.OPEN: 1}
    assert found.realised == pytest.approx(10 * (3 * 0.2 - 0.1) - 10)
    assert found.points == pytest.approx(3 * 4.0)  # nothing of the one that never started
    assert of(entry(0, 1), entry(1, 1)).realised is None


def test_nothing_or_a_single_offer_makes_no_trouble() -> None:
    assert (of().offers, of().mean_occupancy, of().per_fleet_hour, of().per_held_hour) == (0, 0, 0, 0)
    assert (of(entry(0, 1)).accepted, of(entry(0, 1)).occupancy) == (1, ())
