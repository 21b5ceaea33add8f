"""Games, variants and openings are the evaluator's. Figures here come from its own code."""

from __future__ import annotations

from itertools import islice

import pytest

from core.domain.tasks import PVP_GAMES
from trainer.environments.games import (
    GAMES,
    GameOutcome,
    UnknownGame,
    board_game,
    deal,
    dealer,
    forfeited,
    load,
    name_of,
    opened,
    outcome,
    seeds,
    variant_of,
)

pytest.importorskip("pyspiel")


def test_seeds_and_variants_are_drawn_as_the_evaluator_draws_them() -> None:
    assert list(islice(seeds(42), 3)) == [670488, 116740, 26226]
    assert variant_of("leduc_poker", 26226) == 82241847


@pytest.mark.parametrize("name", PVP_GAMES)
def test_every_variant_loads_and_a_seed_repeats_itself(name: str) -> None:
    games = {str(load(name, variant)) for variant in range(36)}
    assert len(games) == GAMES[name].variants
    game = load(name, variant_of(name, 5))
    assert name_of(game) == name
    ends = []
    for _ in range(2):
        state, draw = opened(game, 5), dealer(5)
        deal(state, draw)
        while not state.is_terminal():
            state.apply_action(state.legal_actions()[0])
            deal(state, draw)
        ends.append(str(state))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("name", ["othello", "clobber"])
def test_openings_are_two_to_six_random_moves(name: str) -> None:
    game = load(name, 0)
    states = [opened(game, seed) for seed in range(1, 60)]
    assert {state.move_number() for state in states} == {2, 3, 4, 5, 6}
    assert len({str(state) for state in states}) > 40


def test_who_forfeits_loses() -> None:
    for name in PVP_GAMES:
        game = load(name, 0)
        returns = forfeited(game, 1)
        assert (outcome(game, returns, 0), outcome(game, returns, 1)) == (GameOutcome.WIN, GameOutcome.LOSS)
        assert outcome(game, [0.0, 0.0], 0) is GameOutcome.DRAW


def test_every_game_has_a_name_that_all_parts_know() -> None:
    assert tuple(GAMES) == PVP_GAMES


def test_an_unknown_game_is_named_with_those_there_are() -> None:
    with pytest.raises(UnknownGame, match="'chess' is no game; there are gin_rummy"):
        board_game("chess")
