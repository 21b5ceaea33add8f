"""Matches are played, stopped and scored by the evaluator's rules."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from tests.doubles.each import each
from trainer.environments.games import GameOutcome
from trainer.environments.match import (
    Forfeit,
    GameRecord,
    MatchResult,
    MatchRules,
    ModelContestant,
    PlayerContestant,
    play_game,
    play_match,
)
from trainer.environments.memory import Area
from trainer.environments.models import AnswerTimeout, ChatAnswer, ContextOverflow, ScriptedModel
from trainer.environments.results import match_folder, transcript, write_transcript
from trainer.environments.tool_calls import ToolCall, game_action

pytest.importorskip("pyspiel")
Reply = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], ChatAnswer]


def legal(tools: Sequence[Mapping[str, Any]]) -> list[int]:
    action: list[int] = tools[-1]["function"]["parameters"]["properties"]["action_id"]["enum"]
    return action


def moves(*more: ToolCall) -> Reply:
    """The first legal move, beside other calls; notes on the opponent after a game."""

    def reply(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> ChatAnswer:
        if len(tools) == 4:
            noted = {"slot": 1, "content": messages[1]["content"].split("\n")[0]}
            return ChatAnswer(None, (ToolCall("long_term_memory_append", noted),))
        return ChatAnswer("I move.", (*more, game_action(legal(tools)[0])))

    return reply


def fails(error: Exception) -> Reply:
    def reply(*_: Any) -> ChatAnswer:
        raise error

    return reply


def model(name: str, reply: Reply) -> ModelContestant:
    return ModelContestant(name, ScriptedModel(reply))


def at_random(name: str = "random") -> PlayerContestant:
    def make(game: str, loaded: Any, seat: int, seed: int) -> Any:
        draw = random.Random(seed)
        return lambda state: draw.choice(state.legal_actions())

    return PlayerContestant(name, make)


def ignore(result: MatchResult, record: GameRecord) -> None:
    pass


@each(
    "reply, kind",
    [
        (lambda *_: ChatAnswer("Hm."), "no_call"),
        (lambda *_: ChatAnswer("Hm", cut_off=True), "cut_off"),
        (lambda *_: ChatAnswer(None, (game_action(999),)), "illegal"),
        (fails(AnswerTimeout("slow")), "timeout"),
        (fails(ContextOverflow("long")), "context"),
    ],
)
def test_a_turn_without_a_move_forfeits_the_game(reply: Reply, kind: str) -> None:
    record = play_game("leduc_poker", 5, (model("silent", reply), at_random()))
    assert record.forfeit == (0, Forfeit(kind))
    assert record.outcomes == (GameOutcome.LOSS, GameOutcome.WIN)
    assert record.reflections[0] == ()
    assert f"silent forfeits: {kind}" in transcript(record)


def test_ten_forfeits_end_a_match_after_the_pair() -> None:
    sides = (model("silent", lambda *_: ChatAnswer(None)), at_random())
    result = play_match("leduc_poker", lambda: sides, MatchRules(), ignore)
    # Also ten losses in a row; the forfeits are looked at first.
    assert (result.games, result.ended) == (10, "silent forfeited 10 games")
    assert result.forfeits[0] == {Forfeit.NO_CALL: 10}


@each(
    "outcomes, stopped_after",
    [
        ("L" * 10, 10),
        ("WW" + "L" * 20, 22),
        ("WW" + "L" * 10 + "WW", None),
        ("D" + "L" * 9, None),
        ("W" * 10, 10),
    ],
)
def test_losses_in_a_row_end_a_match(outcomes: str, stopped_after: int | None) -> None:
    ends = {"L": GameOutcome.LOSS, "W": GameOutcome.WIN, "D": GameOutcome.DRAW}
    result = MatchResult("leduc_poker", ("one", "other"))
    for number, letter in enumerate(outcomes, 1):
        ended = ends[letter]
        record = GameRecord(
            "leduc_poker", 1, 1, ("one", "other"), (ended, ended.other()), (0.0, 0.0), (), (), 0.0
        )
        result.add(record, 0)
        if number % 2 == 0 and result.stop():
            assert number == stopped_after
            return
    assert stopped_after is None


def test_a_seed_is_played_twice_with_swapped_seats() -> None:
    seen: list[tuple[int, tuple[str, str]]] = []
    sides = (at_random("one"), at_random("other"))
    result = play_match(
        "liars_dice",
        lambda: sides,
        MatchRules(games=3),
        lambda _, record: seen.append((record.seed, record.names)),
    )
    assert (result.games, result.ended) == (4, "all games played")
    assert [names for _, names in seen] == [("one", "other"), ("other", "one")] * 2
    assert [seed for seed, _ in seen] == [670488, 670488, 116740, 116740]


def test_time_ends_a_match_between_pairs() -> None:
    clock = iter(range(0, 10_000, 400))
    result = play_match(
        "leduc_poker",
        lambda: (at_random("one"), at_random("other")),
        MatchRules(seconds=900),
        ignore,
        now=lambda: next(clock),
    )
    assert (result.games, result.ended) == (6, "time is over")


def test_notes_on_the_opponent_outlive_a_game_and_those_on_the_game_do_not() -> None:
    note = ToolCall("working_memory_rewrite", {"slot": 2, "content": "first move made"})
    one = model("one", moves(note))
    records: list[GameRecord] = []
    play_match(
        "clobber", lambda: (one, at_random()), MatchRules(games=2), lambda _, record: records.append(record)
    )
    last = one.memory.slots[Area.LONG_TERM][0].split("\n")
    assert len(last) == 2
    assert all(line.startswith("The game is over. Result for you: ") for line in last)
    firsts = [next(turn for turn in record.turns if turn.answer) for record in records]
    assert firsts[0].notes == ""
    assert firsts[1].notes == f"long_term_memory 1: {last[0]}"


def test_many_games_at_once_are_the_same_games() -> None:
    def outcomes(at_once: int) -> list[tuple[int, tuple[str, str], tuple[float, ...]]]:
        records: list[GameRecord] = []
        sides = lambda: (model("one", moves()), at_random())  # noqa: E731
        rules = MatchRules(games=20, at_once=at_once)
        play_match("leduc_poker", sides, rules, lambda _, record: records.append(record))
        return sorted((record.seed, record.names, record.returns) for record in records)

    assert len(outcomes(4)) == 20
    assert outcomes(4) == outcomes(1)


def test_an_error_in_one_series_ends_the_match() -> None:
    with pytest.raises(RuntimeError, match="broken"):
        play_match(
            "leduc_poker",
            lambda: (model("one", fails(RuntimeError("broken"))), at_random()),
            MatchRules(games=40, at_once=3),
            ignore,
        )


def test_a_transcript_shows_what_was_asked_answered_and_played(tmp_path: Any) -> None:
    note = ToolCall("working_memory_append", {"slot": 1, "content": "♠"})
    record = play_game("othello", 26226, (model("one", moves(note)), at_random()))
    folder = match_folder(tmp_path, "othello", ("http://x:1/v1", "mcts:50"))
    path = write_transcript(folder, 1, record)
    assert path.parent == tmp_path / "othello/http-x-1-v1-against-mcts-50"
    text = path.read_text()
    assert text.startswith("othello, seed 26226, variant ")
    assert "You play x (Black).\n" in text
    assert '| I move.\n> working_memory_append({"slot": 1, "content": "♠"})\n> game_action(' in text
    assert "working_memory 1: ♠\n" in text
    assert "== afterwards, player 0, one\n> long_term_memory_append(" in text


def test_a_transcript_holds_no_control_sequences(tmp_path: Any) -> None:
    note = ToolCall("working_memory_append", {"slot": 1, "content": "\x1b[2Jgone\x07"})
    record = play_game("othello", 26226, (model("\x1b]0;title\x07one", moves(note)), at_random()))
    text = write_transcript(tmp_path, 1, record).read_text()
    assert not [char for char in text if not char.isprintable() and char not in "\n\t"]
    assert "working_memory 1: gone" in text
    assert "player 0: one" in text
