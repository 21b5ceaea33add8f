"""Rows from games: what they are made of, and that they are the expert's answers."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("pyspiel")

from trainer.environments.games import Player
from trainer.environments.memory import Area, Memory
from trainer.environments.selfplay import GameSource, fill
from trainer.environments.tool_calls import template_tools

TURN_TOOLS = [f"{area}_{verb}" for area in Area for verb in ("rewrite", "append")]


class Highest(Player):
    """The highest legal action, with a note of it in every turn."""

    def choose(self, state: Any) -> int:
        return int(max(state.legal_actions()))

    def note(self, state: Any) -> str | None:
        return f"I played {self.choose(state)}."


def made(name: str, games: int, expert: Player | None = None) -> list[dict[str, Any]]:
    source = GameSource(name, expert or Highest())
    return [dict(row) for seed in range(games) for row in source.rows(seed)]


def calls(row: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    answer = row["messages"][-1]
    return [(call["function"]["name"], call["function"]["arguments"]) for call in answer["tool_calls"]]


def moves(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if calls(row)[-1][0] == "game_action"]


@pytest.mark.parametrize("name", ["leduc_poker", "goofspiel", "clobber"])
def test_every_move_is_the_experts_of_those_that_are_legal(name: str) -> None:
    rows = moves(made(name, 12))
    assert len(rows) > 20
    for row in rows:
        system, user, answer = row["messages"]
        assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]
        assert f"You are playing {name}." in system["content"]
        legal = [int(line.split(" -> ")[0]) for line in user["content"].splitlines() if " -> " in line]
        action = calls(row)[-1][1]["action_id"]
        assert action == max(legal)
        tools = json.loads(row["tools"])
        assert [tool["function"]["name"] for tool in tools] == [*TURN_TOOLS, "game_action"]
        assert tools[-1]["function"]["parameters"]["properties"]["action_id"]["enum"] == legal
        assert answer["content"] == ""


def test_a_seed_is_a_game_and_others_are_other_games() -> None:
    source = GameSource("goofspiel", Highest())
    assert source.rows(5) == source.rows(5)
    assert source.rows(5) != source.rows(6)


def test_states_off_the_experts_path_are_labelled_too() -> None:
    """This expert never folds and never calls before a raise: only others get there."""
    seen = {row["messages"][1]["content"] for row in moves(made("leduc_poker", 150))}
    for actions in ("Call", "Call, Raise, Call", "Raise, Call"):
        assert any(f"Round 1 actions: {actions}\n" in text for text in seen)


def test_notes_are_learned_with_the_move_and_stand_in_the_next_request() -> None:
    rows = moves(made("goofspiel", 30))
    noted = [row for row in rows if len(calls(row)) == 2]
    assert 0.1 < len(noted) / len(rows) < 0.6
    for row in noted:
        name, arguments = calls(row)[0]
        assert name.startswith("working_memory_")
        assert arguments["content"] == f"I played {calls(row)[1][1]['action_id']}."
    texts = [row["messages"][0]["content"] for row in rows]
    assert any("  [1] I played" in text and "\nI played" in text for text in texts)


def test_a_slot_is_begun_anew_before_it_is_cut() -> None:
    names = Counter(calls(row)[0][0] for row in moves(made("goofspiel", 40)) if len(calls(row)) == 2)
    assert names["working_memory_append"] > 0
    for row in made("goofspiel", 40):
        slot = row["messages"][0]["content"].split("  [1] ")[1].split("\n  [2]")[0]
        assert len(slot) < 300


def test_half_of_the_seats_begin_with_something_in_the_slots() -> None:
    class Silent(Highest):
        def note(self, state: Any) -> str | None:
            return None

    rows = moves(made("leduc_poker", 150, Silent()))
    empty = sum(row["messages"][0]["content"].count("(empty)") == 12 for row in rows)
    assert 0.3 < empty / len(rows) < 0.7


def test_reflections_have_memory_tools_only_and_say_how_it_ended() -> None:
    rows = [row for row in made("leduc_poker", 200) if calls(row)[-1][0] != "game_action"]
    assert 10 < len(rows) < 80
    for row in rows:
        assert [tool["function"]["name"] for tool in json.loads(row["tools"])] == TURN_TOOLS
        [(name, arguments)] = calls(row)
        asked = row["messages"][1]["content"]
        assert name == "long_term_memory_rewrite"
        assert f"Result for you: {arguments['content'].split(' ')[0].upper()}." in asked


def test_tools_are_in_the_servers_form() -> None:
    row = moves(made("leduc_poker", 1))[0]
    tools = json.loads(row["tools"])
    assert template_tools(tools) == tools


def test_noise_fits_the_slots() -> None:
    for seed in range(50):
        memory = Memory()
        fill(memory, random.Random(seed))
        texts = [text for slots in memory.slots.values() for text in slots]
        assert len(texts) == 12
        assert all(len(text) < 400 for text in texts)
