"""The program seats models and players, plays all matches and reports them."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.environments import play
from trainer.environments.games import leduc_poker
from trainer.environments.intercode import prompts as shell_prompts
from trainer.environments.match import MatchRules
from trainer.environments.models import ChatAnswer, ModelUnreachable, ScriptedModel
from trainer.environments.play import BadContestant, ModelOptions, entry_for, main, model_entry, play_all
from trainer.environments.tool_calls import game_action

pytest.importorskip("pyspiel")

ROOT = Path(__file__).parents[3]


def test_the_first_plays_each_of_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--against", "mcts:50", "--against", "mcts:2", "--games", "20"]
    assert main(["random", "--game", "clobber", *options, "--output", str(tmp_path), "--json"]) == 0
    shown = capsys.readouterr()
    facts = json.loads(shown.out)
    assert facts == json.loads((tmp_path / "results.json").read_text())
    assert [match["names"] for match in facts["matches"]] == [["random", "mcts:50"], ["random", "mcts:2"]]
    games = sum(match["games"] for match in facts["matches"])
    assert len(list(tmp_path.rglob("*.txt"))) == games
    assert "clobber random : mcts:2: " in shown.err


@pytest.mark.thorough_rows("gin_rummy")
@pytest.mark.parametrize("game", ["gin_rummy", "goofspiel", "othello", "liars_dice", "leduc_poker"])
def test_mcts_plays_every_game(game: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mcts:2", "--against", "random", "--game", game, "--games", "2"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[2].split()[:4] == [game, "mcts:2", "random", "2"]


def test_the_expert_is_our_player_one_for_a_game(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def player() -> Any:
        made.append("leduc_poker")
        return SimpleNamespace(choose=lambda state: state.legal_actions()[-1])

    monkeypatch.setattr(leduc_poker, "GAME", replace(leduc_poker.GAME, player=player))
    entries = [entry_for("expert", ModelOptions()), entry_for("random", ModelOptions())]
    (result,) = play_all(["leduc_poker"], entries, MatchRules(games=8, at_once=4))
    assert (made, result.games) == (["leduc_poker"], 8)
    assert not any(result.forfeits)


def test_a_model_is_seated_in_every_match() -> None:
    def reply(messages: Any, tools: Any) -> ChatAnswer:
        legal = tools[-1]["function"]["parameters"]["properties"].get("action_id", {}).get("enum")
        return ChatAnswer(None, (game_action(legal[0]),) if legal else ())

    entries = [model_entry("one", ScriptedModel(reply), 1), entry_for("random", ModelOptions())]
    results = list(play_all(["leduc_poker", "clobber"], entries, MatchRules(games=4)))
    assert [(result.game, result.games) for result in results] == [("leduc_poker", 4), ("clobber", 4)]
    assert all(result.turns[0] > 4 and not result.forfeits[0] for result in results)


@pytest.mark.parametrize("text", ["no-such-folder", "mcts:0", "mcts:many"])
def test_what_cannot_play_is_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadContestant):
        entry_for(text, ModelOptions())
    assert main([text, "--game", "clobber"]) == 1
    assert text in capsys.readouterr().err


def test_two_of_a_name_are_told_apart() -> None:
    names = [entry.name for entry in play._entries(["random", "random", "mcts"], ModelOptions())]
    assert names == ["random#1", "random#2", "mcts"]


def _moves(messages: Any, tools: Any, *, last: bool = False) -> ChatAnswer:
    """The first legal move or the last, with which few games of leduc poker are lost in a row. Fails where it
    is to reflect: there no move is offered."""
    legal = tools[-1]["function"]["parameters"]["properties"].get("action_id", {}).get("enum")
    if not legal:
        raise ModelUnreachable("gone for a moment")
    return ChatAnswer(None, (game_action(legal[-1 if last else 0]),))


def test_a_reflection_that_fails_is_no_matter() -> None:
    entries = [model_entry("one", ScriptedModel(_moves), 1), entry_for("random", ModelOptions())]
    [result] = play_all(["leduc_poker"], entries, MatchRules(games=4))
    assert (result.games, result.ended) == (4, "all games played")


def test_what_ended_before_a_server_went_away_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def away_in_clobber(messages: Any, tools: Any) -> ChatAnswer:
        if "clobber" in messages[0]["content"]:
            raise ModelUnreachable("nobody listens")
        return _moves(messages, tools)

    entries = [model_entry("one", ScriptedModel(away_in_clobber), 1), entry_for("random", ModelOptions())]
    monkeypatch.setattr(play, "_entries", lambda texts, options: entries)
    asked = ["one", "--game", "leduc_poker", "--game", "clobber", "--games", "4", "--output", str(tmp_path)]
    assert main(asked) == 1
    shown = capsys.readouterr()
    assert "nobody listens" in shown.err
    assert "leduc_poker" in shown.out
    facts = json.loads((tmp_path / "results.json").read_text())
    assert facts["failure"] == "nobody listens"
    assert [(match["game"], match["games"]) for match in facts["matches"]] == [
        ("leduc_poker", 4),
        ("clobber", 0),
    ]


def test_games_of_a_match_count_although_its_server_went_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = itertools.count()

    def away(messages: Any, tools: Any) -> ChatAnswer:
        if next(turns) > 60:
            raise ModelUnreachable("nobody listens")
        return _moves(messages, tools, last=True)

    entries = [model_entry("one", ScriptedModel(away), 1), entry_for("random", ModelOptions())]
    monkeypatch.setattr(play, "_entries", lambda texts, options: entries)
    asked = ["one", "--game", "leduc_poker", "--game", "clobber", "--games", "400"]
    asked += ["--at-once", "3", "--json"]
    assert main(asked) == 1
    [match] = json.loads(capsys.readouterr().out)["matches"]
    assert match["ended"] == "an error"
    assert match["games"] >= 4


@pytest.mark.parametrize("at_once", [1, 3])
def test_shell_tasks_count_although_the_server_went_away(
    at_once: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = itertools.count()

    def away(messages: Any, tools: Any) -> ChatAnswer:
        if next(turns) >= 4:
            raise ModelUnreachable("nobody listens")
        return ChatAnswer(None, (shell_prompts.submit(),))

    models = [model_entry(name, ScriptedModel(away), 1) for name in ("one", "other")]
    monkeypatch.setattr(play, "_entries", lambda texts, options: models)
    asked = ["x", "--game", "intercode", "--games", "30", "--at-once", str(at_once), "--json"]
    assert main(asked) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["failure"] == "nobody listens"
    [one] = facts["shell_tasks"]
    assert (one["name"], len(one["tasks"]), one["ended"]) == ("one", 4, "an error")


def test_a_search_that_ends_its_process_does_not_end_the_match() -> None:
    """After a knock of three melds no discard is allowed, and the engine's search crashes there."""
    from tests.trainer.environments.games.playing import NO_DISCARD, after
    from trainer.environments.games.gin_rummy import UPCARD

    state = after("gin_rummy", NO_DISCARD, knock_card=9)
    state.apply_action(UPCARD)
    [contestant] = [entry_for("mcts:200", ModelOptions()).contestant("search")]
    contestant.begin("gin_rummy", state.get_game(), 0, 1)
    assert contestant.turn(state).action in state.legal_actions()


def test_shell_tasks_are_played_by_each_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def submits(messages: Any, tools: Any) -> ChatAnswer:
        return ChatAnswer(None, (shell_prompts.submit(),))

    def never(messages: Any, tools: Any) -> ChatAnswer:
        return ChatAnswer("I think about it.")

    models = [model_entry("one", ScriptedModel(submits), 1), model_entry("other", ScriptedModel(never), 1)]
    monkeypatch.setattr(play, "_entries", lambda texts, options: [*models, entry_for("random", options)])
    asked = ["x", "--game", "intercode", "--games", "3", "--at-once", "2"]
    assert main([*asked, "--output", str(tmp_path), "--json"]) == 0
    shown = capsys.readouterr()
    facts = json.loads(shown.out)
    assert [(one["name"], len(one["tasks"]), one["submitted"]) for one in facts["shell_tasks"]] == [
        ("one", 3, 3),
        ("other", 3, 0),
    ]
    assert facts["shell_tasks"][1]["turns_without_call"] == 30
    questions = [[task["question"] for task in one["tasks"]] for one in facts["shell_tasks"]]
    assert questions[0] == questions[1]
    assert "random plays no intercode" in shown.err
    kept = sorted((tmp_path / "intercode/other").iterdir())
    assert len(kept) == 3
    assert "Thought 10: I think about it." in kept[0].read_text()


def test_a_server_elsewhere_is_given_no_shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands can read what the operator can read, and the next request would show it to the server."""
    assert main(["http://example.com/v1#name", "--game", "intercode"]) == 1
    assert "could read this machine's files" in capsys.readouterr().err


def test_who_is_no_model_plays_no_shell_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["random", "--game", "intercode"]) == 1
    assert "is played by models" in capsys.readouterr().err


@pytest.mark.parametrize("at_once", [1, 3])
def test_after_an_interrupt_what_was_played_is_reported(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = {"leduc_poker": 0, "clobber": 0}

    def moves(messages: Any, tools: Any) -> ChatAnswer:
        game = next(name for name in turns if name in messages[0]["content"])
        turns[game] += 1
        if game == "clobber" and turns[game] == 40:
            signal.raise_signal(signal.SIGINT)
        return _moves(messages, tools)

    entries = [model_entry("one", ScriptedModel(moves), 1), entry_for("random", ModelOptions())]
    monkeypatch.setattr(play, "_entries", lambda texts, options: entries)
    asked = ["one", "--game", "leduc_poker", "--game", "clobber", "--game", "othello", "--seconds", "1000"]
    asked += ["--at-once", str(at_once), "--output", str(tmp_path)]
    # Leduc poker ends after its losses or, if it has none in a row, after these.
    assert main([*asked, "--games", "400"]) == 130
    shown = capsys.readouterr().out
    assert "leduc_poker against random" in shown
    assert "clobber against random: interrupted" in shown
    assert [one["game"] for one in json.loads((tmp_path / "results.json").read_text())["matches"]] == [
        "leduc_poker",
        "clobber",
    ]


def test_a_second_interrupt_waits_for_no_answer(tmp_path: Path) -> None:
    """What was played is reported, although a server is silent for as long as it likes."""
    program = """
import itertools, signal, sys, threading
from trainer.environments import match, play
from trainer.environments.models import ChatAnswer, ScriptedModel
from trainer.environments.tool_calls import game_action

turns = itertools.count()

def moves(messages, tools):
    if next(turns) == 60:
        print("silent", flush=True)
        threading.Event().wait()
    legal = tools[-1]["function"]["parameters"]["properties"].get("action_id", {}).get("enum")
    return ChatAnswer(None, (game_action(legal[-1]),) if legal else ())

class Pool(match.ThreadPoolExecutor):
    def shutdown(self, wait=True, **options):
        if wait:
            print("waiting", flush=True)
        super().shutdown(wait, **options)

signal.signal(signal.SIGINT, signal.default_int_handler)
match.ThreadPoolExecutor = Pool
entries = [play.model_entry("one", ScriptedModel(moves), 1), play.entry_for("random", play.ModelOptions())]
play._entries = lambda texts, options: entries
play.run(["one", "--game", "leduc_poker", "--at-once", "3", "--games", "400", "--json"])
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout is not None
    late = threading.Timer(120, child.kill)
    late.start()
    with child, child.stdout:
        assert child.stdout.readline() == "silent\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "waiting\n"
        child.send_signal(signal.SIGINT)
        facts = json.loads(child.stdout.read())
    late.cancel()
    assert child.returncode == 130
    assert facts["matches"][0]["ended"] == "interrupted"
    assert facts["matches"][0]["games"] >= 4


def test_a_directory_that_cannot_be_written_is_said_before_a_game(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["random", "--output", str(tmp_path / "file/x")]) == 1
    assert "Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("player", ["expert", "random"])
def test_without_the_games_library_one_line_says_what_to_install(
    player: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("trainer.environments.games.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyspiel", None)
    assert main([player, "--against", "random", "--game", "othello", "--games", "2"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pyspiel is missing in the environment of {sys.executable}: `make training`")
    assert line.endswith(f"{sys.executable} -m pip install open-spiel numba")
