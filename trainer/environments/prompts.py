"""The evaluator's messages and tools of a turn, and of the reflection after a game.

Every text here that reaches a model is the evaluator's, to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer.environments.games import GameOutcome, board_game, name_of
from trainer.environments.memory import SLOTS, Area, Memory

if TYPE_CHECKING:
    import pyspiel

GAME_ACTION = "game_action"
_ONE_ANSWER = (
    "You get ONE response this turn. In it, optionally edit your memory notes, and "
    "then call game_action with a legal action id to commit your move. If you do not "
    "call game_action, you forfeit the turn — so always include it."
)
_REFLECT = (
    "The game is over. Use the memory tools to update your long-term notes on this "
    "opponent for future games — keep durable, generalisable reads (their tendencies, "
    "your counter-strategy) and drop move-by-move detail. There is no move to make."
)
_AREAS = {
    Area.WORKING: "notes for THIS game, reset each game",
    Area.LONG_TERM: "notes on THIS opponent, persist across games",
}
_VERBS = {
    "rewrite": ("Overwrite", "replaces the slot's previous content"),
    "append": ("Append to", "oldest text drops if the slot is full"),
}


def system_prompt(name: str, memory: Memory) -> str:
    """Return the system message of a turn."""
    return _system(name, memory, _ONE_ANSWER)


def user_prompt(state: pyspiel.State, player: int) -> str:
    """Return the user message of a turn: what the player sees, and a line per legal action."""
    name = name_of(state.get_game())
    actions = "\n".join(
        f"{action} -> {state.action_to_string(player, action)}" for action in state.legal_actions(player)
    )
    seen = board_game(name).observe(state, player)
    return f"Current state:\n{seen}\n\nYou are Player {player}.\nLegal actions:\n{actions}"


def turn_messages(name: str, state: pyspiel.State, player: int, memory: Memory) -> list[dict[str, Any]]:
    """Return the conversation of a turn, which is new each time."""
    return _conversation(system_prompt(name, memory), user_prompt(state, player))


def reflection_messages(
    name: str, state: pyspiel.State, player: int, memory: Memory, outcome: GameOutcome
) -> list[dict[str, Any]]:
    """Return the conversation after a game, in which only notes can be written."""
    asked = (
        f"The game is over. Result for you: {outcome.upper()}.\n\n"
        f"Final state:\n{board_game(name).observe(state, player)}\n\n"
        "Update your long-term notes on this opponent for future games."
    )
    return _conversation(_system(name, memory, _REFLECT), asked)


def _system(name: str, memory: Memory, instruction: str) -> str:
    rules = board_game(name).rules
    return f"You are playing {name}.\n# Game Rules {rules}\n\n\n{memory.block()}\n\n{instruction}"


def _conversation(system: str, user: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def tools(legal: Sequence[int]) -> list[dict[str, Any]]:
    """Return the five tools of a turn, keys in the evaluator's order: templates print them as they come."""
    ids = ", ".join(str(action) for action in legal)
    action = {
        "description": "A legal action id for the current state.",
        "type": "integer",
        "enum": list(legal),
    }
    move = f"Commit your move and end your turn. Legal action ids: {ids}."
    return [*memory_tools(), _tool(GAME_ACTION, move, {"action_id": action})]


def memory_tools() -> list[dict[str, Any]]:
    """Return the four tools of a reflection."""
    return [
        _tool(
            f"{area}_{verb}",
            f"{does} a {area} slot (slots 1-{SLOTS[area]}; {purpose}); {effect}.",
            {
                "slot": {
                    "description": "Target slot number.",
                    "type": "integer",
                    "minimum": 1,
                    "maximum": SLOTS[area],
                },
                "content": {"description": "Text content for the slot.", "type": "string"},
            },
        )
        for area, purpose in _AREAS.items()
        for verb, (does, effect) in _VERBS.items()
    ]


def _tool(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"properties": properties, "required": list(properties), "type": "object"}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }
