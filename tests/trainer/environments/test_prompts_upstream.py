"""Every byte is what the evaluator's own code writes; GOD_MINER_UPSTREAM names a checkout of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core.domain.tasks import PVP_GAMES
from trainer.environments import prompts
from trainer.environments.games import GameOutcome, deal, dealer, load, opened, outcome, seeds, variant_of
from trainer.environments.memory import Memory, cut_tokens, cut_words
from trainer.environments.tool_calls import read_arguments

UPSTREAM = os.environ.get("GOD_MINER_UPSTREAM")
TURNS = 1_000
SCRIPT = Path(__file__).with_name("upstream_turns.py")

pytestmark = pytest.mark.skipif(not UPSTREAM, reason="GOD_MINER_UPSTREAM names no checkout of the evaluator")


class Letters:
    """A tokenizer with a token for each letter."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


def happened(name: str) -> list[dict[str, Any]]:
    assert UPSTREAM
    command = [sys.executable, str(SCRIPT), UPSTREAM, name, str(TURNS)]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", PVP_GAMES)
def test_every_prompt_and_schema_is_the_evaluators(name: str) -> None:
    pytest.importorskip("pyspiel")
    memory = Memory()
    state = game = draw = None
    player = turns = 0
    numbers = seeds(7)
    for one in happened(name):
        if "match" in one:
            memory = Memory(cut_tokens(Letters()) if one["match"] % 2 else cut_words)
        elif "seed" in one:
            assert one["seed"] == next(numbers)
            assert one["variant"] == variant_of(name, one["seed"])
            game = load(name, one["variant"])
            state, draw = opened(game, one["seed"]), dealer(one["seed"])
            deal(state, draw)
            memory.new_game()
        elif "edits" in one:
            player = one["player"]
            assert player == state.current_player()
            for tool, text in one["edits"]:
                memory.apply(tool, read_arguments(text))
        elif "messages" in one:
            turns += 1
            assert prompts.turn_messages(name, state, player, memory) == one["messages"]
            tools = prompts.tools(state.legal_actions(player))
            assert json.dumps(tools) == json.dumps(one["tools"]), "keys in their order too"
        elif "action" in one:
            state.apply_action(one["action"])
            deal(state, draw)
        else:
            ended = outcome(game, state.returns(), one["seat"])
            assert ended == one["outcome"]
            written = prompts.reflection_messages(name, state, one["seat"], memory, GameOutcome(ended))
            assert [message["content"] for message in written] == one["reflection"]
    assert turns == TURNS
