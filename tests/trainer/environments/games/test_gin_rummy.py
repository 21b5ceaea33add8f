from __future__ import annotations

import random
import re

import pytest

pyspiel = pytest.importorskip("pyspiel")
pytest.importorskip("numba")

from tests.trainer.environments.games.playing import NO_DISCARD, after, at_random, game, returns, score  # noqa: E402
from trainer.environments.games import gin_rummy as gin  # noqa: E402
from trainer.environments.games import returns_of  # noqa: E402
from trainer.environments.selfplay import MctsPlayer  # noqa: E402

_OTHER = [13, 16, 19, 22, 26, 29, 32, 35]


def _deal(hand: list[int], upcard: int) -> pyspiel.State:
    return after("gin_rummy", [*hand, *_OTHER, upcard])


def test_deadwood_is_the_engines() -> None:
    seen = 0
    for seed in range(4):
        numbers, state = random.Random(seed), game("gin_rummy", hand_size=9).new_initial_state()
        while not state.is_terminal():
            player = state.current_player()
            if player >= 0:
                known = gin.seen(state)
                if known.phase in ("FirstUpcard", "Draw", "Discard"):
                    printed = re.search(rf"Player{player}: Deadwood=(\d+)", state.observation_string(player))
                    assert printed is not None
                    drawn = known.phase == "Discard"  # then the engine leaves out the best discard
                    least = gin._after_discard(known.hand, -1) if drawn else gin.deadwood(known.hand)
                    assert int(least) == int(printed[1])
                    assert known.hand & known.unseen == 0
                    seen += 1
            legal = [action for action in state.legal_actions() if action != gin.KNOCK]
            state.apply_action(numbers.choice(legal or state.legal_actions()))
    assert seen > 100


@pytest.mark.parametrize(
    ("hand", "upcard", "chosen"),
    [
        # Ace, two, three of spades and the four: it belongs to the run.
        ([0, 1, 2, 48, 49, 24, 37, 12], 3, gin.UPCARD),
        # A king fits nothing.
        ([0, 1, 2, 48, 49, 24, 37, 3], 51, gin.PASS),
    ],
)
def test_it_takes_an_upcard_that_helps(hand: list[int], upcard: int, chosen: int) -> None:
    assert gin.GinRummyPlayer().choose(_deal(hand, upcard)) == chosen


def test_it_knocks_as_soon_as_allowed_and_lays_all_melds() -> None:
    player = gin.GinRummyPlayer()
    # A run of three, a set of three, and two low cards; the upcard replaces a king.
    state = _deal([0, 1, 2, 10, 23, 36, 12, 39], 40)
    for expected in (gin.UPCARD, gin.KNOCK, 12):
        assert player.choose(state) == expected
        state.apply_action(expected)
    melds = []
    while state.current_player() == 0:
        melds.append(state.action_to_string(0, player.choose(state)))
        state.apply_action(player.choose(state))
    assert {meld.rpartition(" ")[2] for meld in melds} == {"As2s3s", "JsJcJd", "Pass"}
    returns(state, (player.choose, player.choose), 1)
    assert state.returns()[0] > 0


def test_it_does_not_knock_where_no_discard_is_allowed() -> None:
    state = after("gin_rummy", NO_DISCARD, knock_card=9)
    state.apply_action(gin.UPCARD)
    assert gin.KNOCK in state.legal_actions()
    knocked = state.child(gin.KNOCK)
    assert knocked.legal_actions() == []
    assert returns_of(knocked) == [0.0, 0.0], "the evaluator counts it as a draw"
    assert returns_of(state) is None
    assert gin.GinRummyPlayer().choose(state) < gin.UPCARD


def test_a_search_that_meets_such_a_knock_still_chooses() -> None:
    state = after("gin_rummy", NO_DISCARD, knock_card=9)
    search = MctsPlayer(state.get_game(), 200, seed=1)
    assert search.choose(state) in state.legal_actions()
    assert search.choose(state) == search.choose(state)


def test_it_wins_against_random_moves() -> None:
    assert score("gin_rummy", gin.GinRummyPlayer().choose, at_random(1), 3) >= 0.9
