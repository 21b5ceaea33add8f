"""Play at random with the evaluator's own code: CHECKOUT GAME TURNS. What happens is a line of JSON each.

It runs in a process of its own, because the checkout's packages are named as ours are.
"""

from __future__ import annotations

import json
import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

CHECKOUT, GAME, TURNS = sys.argv[1], sys.argv[2], int(sys.argv[3])
sys.path.insert(0, CHECKOUT)
try:
    import openai  # noqa: F401
except ImportError:
    stand_in = ModuleType("openai")
    for name in ("OpenAI", "APITimeoutError", "APIConnectionError", "APIStatusError", "BadRequestError"):
        setattr(stand_in, name, type(name, (Exception,), {}))
    sys.modules["openai"] = stand_in

from core.constants.environments import ENVIRONMENT_CONFIGS, EnvironmentName  # noqa: E402
from core.models.pvp_models import ChatCompletionConfig, GameScoringContext, MemoryArea  # noqa: E402
from core.pvp import constants, game_eval  # noqa: E402
from core.pvp import tools as tool_lib  # noqa: E402
from core.pvp.bot import LLMBot  # noqa: E402
from core.pvp.chat import _decode_arguments  # noqa: E402
from core.pvp.memory import SlotMemory, WhitespaceTokenCounter  # noqa: E402
from core.pvp.scoring import determine_outcome  # noqa: E402
from core.pvp.tokenizer_counter import HFTokenCounter  # noqa: E402

NAME = EnvironmentName(GAME)


class Letters:
    """A tokenizer with a token for each letter."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


def say(**facts: Any) -> None:
    print(json.dumps(facts))


def edits(draw: random.Random) -> list[tuple[str, str]]:
    """Calls of memory tools, good and bad."""
    names = [f"{area}_memory_{verb}" for area in ("working", "long_term") for verb in ("rewrite", "append")]
    slots: list[Any] = [*range(10), "2", " 3 ", "x", True, None, 2.0, {"a": 1}]
    words = ["raise", "fold", "weak", "<think>hm</think>", "knock\n", "♠", "bluff(s)", "3-5"]
    made = []
    for _ in range(draw.choice((0, 0, 1, 2))):
        text: Any = " ".join(draw.choice(words) for _ in range(draw.choice((0, 3, 40, 300))))
        content = draw.choice((text, text, text, 5, None, [1, {"b": text[:9], "a": 2}]))
        arguments = {"slot": draw.choice(slots), "content": content}
        if draw.random() < 0.1:
            arguments.pop(draw.choice(("slot", "content")))
        made.append((draw.choice([*names, "no_such_tool"]), json.dumps(arguments)))
    return made


def play(seed: int, seat: int, turns: int, long_term: SlotMemory, counter: Any) -> int:
    agent = game_eval._AGENT_REGISTRY[NAME]()
    variant = game_eval.config_id_for_seed(seed, ENVIRONMENT_CONFIGS[NAME])
    game = agent.load_game(agent.generate_params(variant))
    draw = random.Random(seed)
    working = SlotMemory(constants.PVP_WORKING_MEM_SLOTS, constants.PVP_WORKING_SLOT_TOKENS, counter)
    config = ChatCompletionConfig(inference_model="x", base_url="http://127.0.0.1")
    memories = {MemoryArea.WORKING: working, MemoryArea.LONG_TERM: long_term}
    asked: list[Any] = []
    bots = [LLMBot(game, player, None, config, agent, memories) for player in range(2)]

    def step(bot: LLMBot, state: Any) -> int:
        nonlocal turns
        if turns == 0:
            raise StopIteration
        turns -= 1
        legal = state.legal_actions(bot._player_id)
        calls = edits(draw)
        for name, text in calls:
            tool_lib.execute_memory_tool(memories, name, _decode_arguments(text))
        say(player=bot._player_id, edits=calls)
        asked.clear()

        def chat(_: Any, messages: list[Any], tools: list[Any]) -> Any:
            asked.extend((messages, tools))
            return SimpleNamespace(content=None, tool_calls=[call])

        action = draw.choice(legal)
        call = SimpleNamespace(name="game_action", arguments={"action_id": action})
        bot._chat_fn = chat
        assert bot._run_turn(state) == action
        messages, tools = asked
        say(messages=[one.to_openai() for one in messages], tools=[one.to_openai() for one in tools])
        say(action=action)
        return action

    for bot in bots:
        bot.step = lambda state, bot=bot: step(bot, state)
    state = game.new_initial_state()
    agent.setup_initial_state(state, seed)
    say(seed=seed, variant=variant)
    try:
        evaluation = game_eval._evaluate_game_with_timeout(state, bots, seed)
    except StopIteration:
        return 0
    low, high = game.min_utility(), game.max_utility()
    context = GameScoringContext(
        returns=evaluation.returns, player_id=seat, is_zero_sum=True, min_utility=low, max_utility=high
    )
    outcome = determine_outcome(context)
    prompt = [bots[seat]._reflection_system_prompt(), bots[seat]._reflection_user_prompt(state, outcome)]
    say(outcome=outcome.value, seat=seat, reflection=prompt)
    return turns


def main() -> None:
    draw = random.Random(7)
    left = TURNS
    match = 0
    while left:
        # A match has one memory over its games; every other counts letters as tokens.
        counter = HFTokenCounter(Letters()) if match % 2 else WhitespaceTokenCounter()
        long_term = SlotMemory(constants.PVP_LONGTERM_MEM_SLOTS, constants.PVP_LONGTERM_SLOT_TOKENS, counter)
        say(match=match)
        for number in range(4):
            if left:
                left = play(
                    draw.randint(1, constants.PVP_SEED_RANGE_MAX), number % 2, left, long_term, counter
                )
        match += 1


main()
