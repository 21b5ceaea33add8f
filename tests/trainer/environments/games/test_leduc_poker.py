from __future__ import annotations

import pytest

pytest.importorskip("pyspiel")
pytest.importorskip("numba")

from benchmarks.exploitability import of_leduc
from tests.trainer.environments.games.playing import game
from trainer.environments.games.leduc_poker import LeducPlayer


def test_it_raises_while_it_may_and_never_folds() -> None:
    state = game("leduc_poker").new_initial_state()
    for card in (0, 4):
        state.apply_action(card)
    chosen = []
    while not state.is_chance_node():
        chosen.append(LeducPlayer().choose(state))
        state.apply_action(chosen[-1])
    assert chosen == [2, 2, 1]


def test_nobody_wins_against_it_on_average() -> None:
    """The value of an exact best response, wins minus losses, is that of an equal game."""
    assert of_leduc(LeducPlayer()) == pytest.approx(0.0, abs=1e-12)
