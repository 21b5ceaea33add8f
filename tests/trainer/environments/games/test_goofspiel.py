from __future__ import annotations

import pytest

pyspiel = pytest.importorskip("pyspiel")
pytest.importorskip("numba")

from tests.trainer.environments.games.playing import after, at_random, score  # noqa: E402
from trainer.environments.games.goofspiel import GoofspielPlayer, KnownBids, known  # noqa: E402


def test_rounds_are_read_as_the_player_saw_them() -> None:
    # Prizes 5, 8, 2: the first seat bid 3 and 4, the second 6 and 4.
    state = after("goofspiel", [4, 2, 5, 7, 3, 3, 1])
    assert known(state) == KnownBids(8, (3, 4), (5, 8), (-1, 0), 2, -5.0)
    state.apply_action(0)
    assert known(state) == KnownBids(8, (6, 4), (5, 8), (1, 0), 2, 5.0)


def test_the_highest_card_decides_when_all_hangs_on_the_prize() -> None:
    # 1, 2 and 3 of five prizes are gone, each split by equal bids of 1, 2 and 3; 5 is out.
    state = after("goofspiel", [0, 0, 0, 1, 1, 1, 2, 2, 2, 4], num_cards=5)
    assert GoofspielPlayer().choose(state) + 1 == 5


def test_a_note_tells_prize_and_bid() -> None:
    state = after("goofspiel", [6])
    bid = GoofspielPlayer().choose(state) + 1
    assert GoofspielPlayer().note(state) == f"Prize 7: I bid {bid}."


def _prize(state: pyspiel.State) -> int:
    """Bid the prize, or what is next above it."""
    prize = known(state).prize
    return int(min(state.legal_actions(), key=lambda action: (action + 1 < prize, abs(action + 1 - prize))))


def test_it_wins_against_simple_rules() -> None:
    choose = GoofspielPlayer().choose
    assert score("goofspiel", choose, at_random(1), 8) >= 0.7
    assert score("goofspiel", choose, _prize, 8) >= 0.7
