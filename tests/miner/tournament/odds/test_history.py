"""What past tournaments say of the field, and how right the odds would have been."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import pytest

from core.domain.tournament_rules import CHAMPION_NAME, TOURNAMENTS, emission_shares
from core.domain.wire import TournamentType
from miner.tournament.odds.history import (
    ASSUMED_AGREEMENT,
    ASSUMED_CHALLENGER_WINS,
    ASSUMED_ENTRANTS,
    ASSUMED_FALLS,
    CORRELATIONS,
    History,
    backtest,
    by_date,
    field_facts,
    history_of,
    kind_share,
)
from miner.tournament.public_api import Tournament, tournament_of

IMAGE = TournamentType.IMAGE


def tournament(
    day: int, *, won: int = 0, new: bool = False, losses: Sequence[Sequence[float]] = (), kind: str = "image"
) -> Tournament:
    """As the public API has it: nine entries and the champion, and six tasks of the boss round."""
    hotkeys = [f"5Entry{letter}" for letter in "abcdefghi"]
    scores = [
        [{"hotkey": hotkey, "test_loss": loss} for hotkey, loss in zip(hotkeys, row, strict=False)]
        for row in losses
    ]
    tasks = [
        {"task_id": f"one-{at}", "group_id": "g", "participant_scores": row} for at, row in enumerate(scores)
    ]
    found = tournament_of(
        {
            "tournament_id": f"tourn_{99 - day}_202611{day:02}",
            "tournament_type": kind,
            "status": "completed",
            "base_winner_hotkey": "5Boss",
            "winner_hotkey": hotkeys[0] if new else CHAMPION_NAME,
            "participants": [{"hotkey": one} for one in [*hotkeys, CHAMPION_NAME]],
            "rounds": [
                {"round_number": 1, "tasks": tasks},
                {"round_number": 2, "tasks": [{"task_id": "two"}]},
            ],
            "boss_round_performance": [
                {"task_id": f"boss-{at}", "task_type": "ImageTask", "challenger_won": at < won}
                for at in range(6)
            ],
        }
    )
    assert found is not None
    return found


def test_a_champion_that_stays_is_no_new_one_and_no_entry() -> None:
    stayed, fell = tournament(9), tournament(16, new=True)
    assert (stayed.dethroned, stayed.champion) == (False, "5Boss")
    assert (fell.dethroned, fell.champion) == (True, "5Entrya")
    assert len(stayed.entrants) == 9
    assert tournament_of(stayed.as_answer()) == stayed
    running = {"tournament_id": "tourn_1_20261123", "tournament_type": "image", "base_winner_hotkey": "5Boss"}
    read = tournament_of(running)
    assert read is not None
    assert read.dethroned is None
    assert by_date([fell, read, stayed, tournament(9, kind="text")], IMAGE) == [stayed, fell]


def test_without_history_everything_is_assumed_and_with_it_both_count() -> None:
    facts = field_facts(History(), 6)
    assumed = (ASSUMED_ENTRANTS, ASSUMED_CHALLENGER_WINS, ASSUMED_FALLS, ASSUMED_AGREEMENT)
    assert (facts.entrants, facts.challenger_wins, facts.falls, facts.agreement) == pytest.approx(assumed)
    # As many tournaments as the assumption weighs: halfway between both.
    past = [tournament(day, won=6, new=True, losses=[range(9), range(9)]) for day in range(1, 5)]
    found = history_of(past)
    assert (found.tournaments, found.dethroned, found.boss_tasks_won, found.agreement) == (4, 4, 24, 1.0)
    facts = field_facts(found, 6)
    assert facts.entrants == 9
    assert facts.challenger_wins == pytest.approx((1 + ASSUMED_CHALLENGER_WINS) / 2)
    assert facts.falls == pytest.approx((1 + ASSUMED_FALLS) / 2)
    assert facts.agreement == pytest.approx((1 + ASSUMED_AGREEMENT) / 2)


@pytest.mark.parametrize(
    ("losses", "agreement"),
    [
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 1.0),
        ([[1, 2, 3, 4], [9, 8, 7, 6]], -1.0),
        ([[1, 2, 3, 4], [2, 1, 4, 3]], 0.6),
        ([[1, 2, 3, 4], [5, 5, 5, 5]], 0.0),
        ([[1, 2, 3], [1, 2, 3]], None),
        ([[1, 2, 3, 4]], None),
    ],
)
def test_likeness_of_two_tasks(losses: Sequence[Sequence[float]], agreement: float | None) -> None:
    found = history_of([tournament(1, losses=losses)]).agreement
    assert found == (None if agreement is None else pytest.approx(agreement))


def test_many_entries_take_emission_from_a_kind() -> None:
    assert kind_share([], IMAGE) == pytest.approx(emission_shares({})[IMAGE])
    full = [tournament(day) for day in range(1, 8)]
    # The last one does not count yet, and one kind alone is compared with nobody.
    assert kind_share(full, IMAGE) == pytest.approx(emission_shares({IMAGE: 9.0})[IMAGE])


def test_a_backtest_knows_only_what_was_before() -> None:
    past = [tournament(day, won=won, new=won >= 5) for day, won in ((2, 6), (9, 3), (16, 5))]
    found = backtest([past[2], past[0], past[1]], TOURNAMENTS[IMAGE])
    assert found is not None
    assert [one.tournament_id for one in found.forecasts] == [one.tournament_id for one in past[1:]]
    first, last = found.forecasts
    q = (6 + 24 * ASSUMED_CHALLENGER_WINS) / 30
    assert first.challenger_wins == pytest.approx(q)
    assert first.chances[0] == pytest.approx(q**6 + 6 * q**5 * (1 - q), abs=0.02)
    assert (first.dethroned, last.dethroned) == (False, True)
    for at in range(len(CORRELATIONS)):
        assert found.brier[at] == pytest.approx(fmean([first.chances[at] ** 2, (1 - last.chances[at]) ** 2]))
    assert found.brier_of_rate == pytest.approx(fmean([(2 / 5) ** 2, (1 - 2 / 6) ** 2]))
    errors = 3 * (1 - q) ** 2 + 3 * q**2
    q = last.challenger_wins
    assert found.brier_of_tasks == pytest.approx((errors + 5 * (1 - q) ** 2 + q**2) / 12)
    assert backtest(past[:1], TOURNAMENTS[IMAGE]) is None
