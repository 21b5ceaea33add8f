"""Games, variants and openings are the evaluator's. Figures here come from its own code."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from core.domain.tasks import PVP_GAMES
from trainer.environments import games, play, selfplay, sources
from trainer.environments.games import (
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
    loaded = {str(load(name, variant)) for variant in range(36)}
    assert len(loaded) == len(board_game(name).variants)
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


TIC_TAC_TOE = """
from trainer.environments.games import BoardGame, Player, rules_beside


class FirstLegal(Player):
    def choose(self, state):
        return state.legal_actions()[0]


GAME = BoardGame(
    name="tic_tac_toe",
    tasks=(1, 9),
    rules=rules_beside(__file__),
    advice="take the middle",
    player=FirstLegal,
)
"""


def test_a_game_is_one_module_its_rules_and_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the checklist in CONTRIBUTING.md says."""
    (tmp_path / "tic_tac_toe.py").write_text(TIC_TAC_TOE)
    (tmp_path / "tic_tac_toe.txt").write_text("Three in a row win.")
    monkeypatch.setattr(games, "__path__", [*games.__path__, str(tmp_path)])
    for module in (games, play, selfplay, sources):
        monkeypatch.setattr(module, "PVP_GAMES", (*PVP_GAMES, "tic_tac_toe"))
    source = sources.source_of("tic_tac_toe", ())
    source.get_ready()
    rows = [row for seed in range(1, 40) for row in source.rows(seed)]
    assert all("# Game Rules Three in a row win." in row["messages"][0]["content"] for row in rows)
    assert any("Keep to it: take the middle." in json.dumps(row) for row in rows)
    asked = ["expert", "--game", "tic_tac_toe", "--against", "mcts:20", "--games", "4", "--json"]
    assert play.main(asked) == 0
    assert json.loads(capsys.readouterr().out)["matches"][0]["games"] == 4


def test_an_unknown_game_is_named_with_those_there_are() -> None:
    with pytest.raises(UnknownGame, match="'chess' is not a known game; known games: gin_rummy"):
        board_game("chess")
