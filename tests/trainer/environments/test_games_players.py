"""What holds for every player."""

from __future__ import annotations

import pytest

pyspiel = pytest.importorskip("pyspiel")
pytest.importorskip("numba")

from tests.trainer.environments.games.playing import PARAMETERS, after, at_random, game, returns  # noqa: E402
from trainer.environments.games import Player, board_game, liars_dice  # noqa: E402


def _player(name: str) -> Player:
    """With next to no iterations for liar's dice, whose solution takes a minute."""
    return liars_dice.LiarsDicePlayer(2) if name == "liars_dice" else board_game(name).player()


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_state_has_one_legal_label(name: str) -> None:
    player, again = _player(name), _player(name)

    def checked(state: pyspiel.State) -> int:
        action = player.choose(state)
        assert action in state.legal_actions()
        assert again.choose(state.clone()) == action
        return action

    for seed in range(3):
        for choices in ((checked, at_random(seed)), (at_random(seed), checked)):
            assert len(returns(game(name).new_initial_state(), choices, seed)) == 2


_GIN_HAND, _GIN_OTHERS = (
    [0, 1, 2, 20, 21, 34, 47, 51],
    ([3, 4, 5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16, 17, 18]),
)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("leduc_poker", [0, 2], [0, 5]),
        ("leduc_poker", [4, 0, 1, 1, 2], [4, 3, 1, 1, 2]),
        ("liars_dice", [0, 1, 1, 3, 5, 0, 0, 0, 0, 0], [0, 1, 1, 3, 5, 5, 5, 5, 5, 5]),
        ("gin_rummy", [*_GIN_HAND, *_GIN_OTHERS[0], 30], [*_GIN_HAND, *_GIN_OTHERS[1], 30]),
        # The second seat chooses after the first has bid.
        ("goofspiel", [4, 2], [4, 7]),
        # Of past bids only who won is known.
        ("goofspiel", [4, 5, 3, 1], [4, 5, 2, 1]),
    ],
)
def test_what_is_hidden_changes_nothing(name: str, one: list[int], other: list[int]) -> None:
    player = _player(name)
    assert player.choose(after(name, one)) == player.choose(after(name, other))
    assert player.note(after(name, one)) == player.note(after(name, other))
