"""The evaluator's tree search."""

from __future__ import annotations

import pytest

pyspiel = pytest.importorskip("pyspiel")

from trainer.environments.selfplay import MctsPlayer  # noqa: E402


@pytest.mark.parametrize("seed", range(5))
def test_the_search_takes_a_win_at_hand(seed: int) -> None:
    loaded = pyspiel.load_game("tic_tac_toe")
    state = loaded.new_initial_state()
    for cell in (0, 3, 1, 4):
        state.apply_action(cell)
    assert MctsPlayer(loaded, 50, seed).choose(state) == 2
