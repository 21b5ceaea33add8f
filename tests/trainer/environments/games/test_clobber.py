from __future__ import annotations

import random
from functools import cache

import pytest

pyspiel = pytest.importorskip("pyspiel")
pytest.importorskip("numba")

from tests.trainer.environments.games.playing import at_random, game, score  # noqa: E402
from trainer.environments.games.clobber import ClobberPlayer, pieces  # noqa: E402


def test_pieces_are_read_as_the_actions_count() -> None:
    state = game("clobber", rows=5, columns=6).new_initial_state()
    state.apply_action(state.legal_actions()[7])
    own, other, rows, columns = pieces(state)
    assert (rows, columns) == (5, 6)
    assert own.bit_count() + other.bit_count() == 29
    assert all(own >> (action >> 2) & 1 for action in state.legal_actions())


@pytest.mark.thorough_rows("4")
@pytest.mark.parametrize(("rows", "columns"), [(4, 5), (5, 5), (5, 6)])
def test_a_won_end_is_won(rows: int, columns: int) -> None:
    player = ClobberPlayer()

    @cache
    def wins(board: str) -> bool:
        state = boards[board]
        for action in state.legal_actions():
            child = state.child(action)
            if child.is_terminal():
                return True
            boards[child.observation_string(0) + str(child.current_player())] = child
            if not wins(child.observation_string(0) + str(child.current_player())):
                return True
        return False

    boards: dict[str, pyspiel.State] = {}
    won = 0
    for seed in range(12):
        numbers, state = random.Random(seed), game("clobber", rows=rows, columns=columns).new_initial_state()
        while not state.is_terminal() and len(state.legal_actions()) > 7:
            state.apply_action(numbers.choice(state.legal_actions()))
        if state.is_terminal():
            continue
        name = state.observation_string(0) + str(state.current_player())
        boards[name] = state
        if wins(name):
            child = state.child(player.choose(state))
            key = child.observation_string(0) + str(child.current_player())
            boards[key] = child
            assert child.is_terminal() or not wins(key)
            won += 1
    assert won > 2


def test_it_wins_against_random_moves() -> None:
    assert score("clobber", ClobberPlayer().choose, at_random(1), 5) >= 0.9
