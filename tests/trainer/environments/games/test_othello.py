from __future__ import annotations

import random

import pytest

pyspiel = pytest.importorskip("pyspiel")
np = pytest.importorskip("numpy")
pytest.importorskip("numba")

from tests.trainer.environments.games.playing import at_random, game, score  # noqa: E402
from trainer.environments.games import othello  # noqa: E402


def _positions(seed: int, empty: int | None = None) -> list[pyspiel.State]:
    """All states of a random game that have a choice, or those with so few squares empty."""
    numbers, state, found = random.Random(seed), game("othello").new_initial_state(), []
    while not state.is_terminal():
        if empty is None or str(state).count("-") == empty:
            found.append(state.clone())
        state.apply_action(numbers.choice(state.legal_actions()))
    return found


def test_bitboards_have_the_engines_moves() -> None:
    for state in _positions(1):
        own, other = (np.uint64(discs) for discs in othello.discs(state))
        moves = int(othello._moves(own, other))
        assert [square for square in range(64) if moves >> square & 1] == [
            action for action in state.legal_actions() if action != othello.PASS
        ]


def _value(state: pyspiel.State, player: int) -> float:
    if state.is_terminal():
        return state.returns()[player]
    values = [_value(state.child(action), player) for action in state.legal_actions()]
    return max(values) if state.current_player() == player else min(values)


def test_the_end_is_played_exactly() -> None:
    checked = 0
    for seed in range(12):
        for state in _positions(seed, empty=5):
            player = state.current_player()
            best = max(_value(state.child(action), player) for action in state.legal_actions())
            assert _value(state.child(othello.OthelloPlayer().choose(state)), player) == best
            checked += 1
    assert checked > 5


def test_it_wins_against_random_moves() -> None:
    assert score("othello", othello.OthelloPlayer().choose, at_random(1), 3) == 1.0
