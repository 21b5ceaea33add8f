"""Starts, fees, and what an entry is worth."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from core.domain.wire import TournamentType
from miner.tournament.calendar import Known, Market, Stakes, calendar_of
from miner.tournament.rules import AS_OF, CHAMPION_SHARE, EMISSION_WEIGHTS

TEXT, IMAGE, ENVIRONMENT = TournamentType.TEXT, TournamentType.IMAGE, TournamentType.ENVIRONMENT
SUNDAY = datetime(2026, 11, 29, 20, 0, tzinfo=UTC)


def test_kinds_come_by_their_start_with_stored_figures_and_their_date() -> None:
    found = calendar_of(SUNDAY, {}, {}, {}, Market())
    assert [(one.kind, one.starts_at.isoformat()) for one in found] == [
        (ENVIRONMENT, "2026-11-30T09:00:00+00:00"),
        (TEXT, "2026-11-30T11:00:00+00:00"),
        (IMAGE, "2026-11-30T13:00:00+00:00"),
    ]
    assert found[1].register_by.hour == 10
    assert (found[1].fee.value, found[1].weight.value) == (0.7, 0.35)
    assert AS_OF in found[1].fee.source
    assert (found[1].prize, found[1].break_even, found[1].expected) == (None, None, None)


def test_live_figures_go_before_stored_ones() -> None:
    found = calendar_of(SUNDAY, {TEXT: Known(1.4, "the API")}, {TEXT: Known(0.5, "the API")}, {}, Market())
    by_kind = {one.kind: one for one in found}
    assert by_kind[TEXT].fee == Known(1.4, "the API")
    assert by_kind[TEXT].weight.value == 0.5
    assert by_kind[IMAGE].fee.value == 0.4


def test_an_entry_breaks_even_at_the_fee_over_the_prize() -> None:
    stakes = {TEXT: Stakes(0.1, 14.0), IMAGE: Stakes(0.5, 0.2), ENVIRONMENT: Stakes(None, 6.0)}
    text, image, environment = calendar_of(SUNDAY, {}, {}, stakes, Market())
    assert text.break_even == pytest.approx(0.05)
    assert text.expected == pytest.approx(0.1 * 14 - 0.7)
    # A prize below the fee: no chance is high enough.
    assert image.break_even == 2
    assert image.expected == pytest.approx(-0.3)
    assert environment.break_even == pytest.approx(0.1)
    assert environment.expected is None


def test_the_most_valuable_kind_comes_first() -> None:
    stakes = {TEXT: Stakes(0.1, 8.0), IMAGE: Stakes(0.4, 8.0)}
    assert [one.kind for one in calendar_of(SUNDAY, {}, {}, stakes, Market())] == [IMAGE, TEXT, ENVIRONMENT]


def test_a_prize_from_emission_and_price() -> None:
    market = Market(emission=3000.0, alpha_price=0.01)
    by_kind = {one.kind: one for one in calendar_of(SUNDAY, {}, {}, {}, market)}
    assert by_kind[TEXT].prize == pytest.approx(3000 * 7 * 0.35 * 16 / 21 * 0.01)
    assert pytest.approx(1) == CHAMPION_SHARE * (1 + 1 / 4 + 1 / 16)
    assert sum(EMISSION_WEIGHTS.values()) < 1


def test_a_prize_from_the_validators_projection() -> None:
    market = Market(alpha_price=0.02, projected={IMAGE: 500.0})
    by_kind = {one.kind: one for one in calendar_of(SUNDAY, {}, {}, {}, market)}
    assert by_kind[IMAGE].prize == 10
    assert by_kind[TEXT].prize is None
    assert calendar_of(SUNDAY, {}, {}, {}, Market(projected={IMAGE: 500.0}))[2].prize is None


@pytest.mark.parametrize(("wins", "bonus"), [(0, 0.0), (1, 0.05), (4, 0.2), (5, 0.25), (9, 0.25)])
def test_the_bonus_of_earlier_wins_is_five_percent_each_and_at_most_a_quarter(
    wins: int, bonus: float
) -> None:
    by_kind = {
        one.kind: one for one in calendar_of(SUNDAY, {}, {}, {TEXT: Stakes(0.5, 10.0, wins)}, Market())
    }
    assert by_kind[TEXT].bonus == pytest.approx(bonus)
    assert by_kind[TEXT].expected == pytest.approx(4.3)  # the bonus is no money
