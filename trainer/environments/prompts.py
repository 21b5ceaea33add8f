"""What the evaluator sends with each turn: two messages and the tools; and the reflection after a game.

Every text here that reaches a model is the evaluator's, to the byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.environments.games import GameOutcome, board_game, name_of
from trainer.environments.memory import SLOTS, Area, Memory

if TYPE_CHECKING:
    import pyspiel

GAME_ACTION = "game_action"
TURN_TOKENS = 512
REFLECTION_TOKENS = 384
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
_LEDUC_ACTIONS = {"0": "Fold", "1": "Call", "2": "Raise"}
_NO_CARD = "-10000"


@cache
def rules(name: str) -> str:
    """The rules of a game as the evaluator words them."""
    return (Path(__file__).parent / "rules" / f"{board_game(name).name}.txt").read_text("utf-8")


def system_prompt(name: str, memory: Memory) -> str:
    """The system message of a turn."""
    return _system(name, memory, _ONE_ANSWER)


def user_prompt(state: pyspiel.State, player: int) -> str:
    """The user message of a turn: what the player sees, and a line per legal action."""
    name = name_of(state.get_game())
    actions = "\n".join(
        f"{action} -> {state.action_to_string(player, action)}" for action in state.legal_actions(player)
    )
    seen = observe(name, state, player)
    return f"Current state:\n{seen}\n\nYou are Player {player}.\nLegal actions:\n{actions}"


def turn_messages(name: str, state: pyspiel.State, player: int, memory: Memory) -> list[dict[str, Any]]:
    """The conversation of a turn, which is new each time."""
    return _conversation(system_prompt(name, memory), user_prompt(state, player))


def reflection_messages(
    name: str, state: pyspiel.State, player: int, memory: Memory, outcome: GameOutcome
) -> list[dict[str, Any]]:
    """The conversation after a game, in which only notes can be written."""
    asked = (
        f"The game is over. Result for you: {outcome.upper()}.\n\n"
        f"Final state:\n{observe(name, state, player)}\n\n"
        "Update your long-term notes on this opponent for future games."
    )
    return _conversation(_system(name, memory, _REFLECT), asked)


def _system(name: str, memory: Memory, instruction: str) -> str:
    return f"You are playing {name}.\n# Game Rules {rules(name)}\n\n\n{memory.block()}\n\n{instruction}"


def _conversation(system: str, user: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def tools(legal: Sequence[int]) -> list[dict[str, Any]]:
    """The five tools of a turn, keys in the evaluator's order: templates print them as they come."""
    ids = ", ".join(str(action) for action in legal)
    action = {
        "description": "A legal action id for the current state.",
        "type": "integer",
        "enum": list(legal),
    }
    move = f"Commit your move and end your turn. Legal action ids: {ids}."
    return [*memory_tools(), _tool(GAME_ACTION, move, {"action_id": action})]


def memory_tools() -> list[dict[str, Any]]:
    """The four tools that a reflection has."""
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


def observe(name: str, state: pyspiel.State, player: int) -> str:
    """What a player sees of a state, as the evaluator writes it."""
    return _OBSERVERS[name](state, player)


def _plain(state: pyspiel.State, player: int) -> str:
    return str(state.observation_string(player))


def _coloured(first: str, second: str) -> Callable[[pyspiel.State, int], str]:
    def seen(state: pyspiel.State, player: int) -> str:
        return f"You play {second if player else first}.\n{state.observation_string(player)}"

    return seen


def _goofspiel(state: pyspiel.State, player: int) -> str:
    return f"You are Player {player} (P{player}).\n{state.observation_string(player)}"


def _liars_dice(state: pyspiel.State, player: int) -> str:
    # Dice without separators, then the bids in their order: "13356 2-5 3-5".
    rolled, *bids = state.information_state_string(player).split() or [""]
    dice = [int(die) for die in rolled if die.isdigit()]
    players = state.num_players()
    lines = [
        f"Your dice: {dice} (showing: {', '.join(map(str, dice))})",
        f"Dice per player: {len(dice)}",
        f"Total dice in game: {len(dice) * players}",
        f"Players: {players}",
        f"Current player: Player {state.current_player()}",
    ]
    if last := [bid for bid in bids if "-" in bid][-1:]:
        quantity, face = last[0].split("-")
        lines += [
            f'\nCurrent bid: "{last[0]}" (at least {quantity} dice showing {face} across all players)',
            "You can: (1) Make a higher bid, or (2) Call 'Liar'",
        ]
    else:
        lines.append("No bid yet - you must make the first bid")
    return "\n".join(lines)


def _leduc_poker(state: pyspiel.State, player: int) -> str:
    # "[Observer: 0][Private: 2][Round 1][Player: 0][Pot: 2][Money: 99 99][Public: 3][Round1: 1 1][Round2: ]"
    text = state.information_state_string(player)
    facts = dict(re.findall(r"\[(\w+):? ([^\]]*)\]", text))
    private, public = facts.get("Private", _NO_CARD), facts.get("Public", _NO_CARD)
    lines = [f"Your card: {_leduc_card(private) if private != _NO_CARD else '(not dealt yet)'}"]
    if public != _NO_CARD:
        lines.append(f"Public card: {_leduc_card(public)}")
        if private != _NO_CARD and int(private) // 2 == int(public) // 2:
            lines.append("Hand: PAIR")
    lines += [f"Round: {facts['Round']}/2", f"Pot: {facts['Pot']} chips"]
    chips = facts["Money"].split()
    lines += [f"Your chips: {chips[player]}", f"Opponent chips: {chips[1 - player]}"]
    for number in (1, 2):
        if actions := facts.get(f"Round{number}", "").split():
            lines.append(f"Round {number} actions: {', '.join(_LEDUC_ACTIONS[action] for action in actions)}")
    return "\n".join(lines)


def _leduc_card(card: str) -> str:
    rank, suit = divmod(int(card), 2)
    return f"{'JQK'[rank]}{'♠♥'[suit]}"


_OBSERVERS: Mapping[str, Callable[[pyspiel.State, int], str]] = {
    "gin_rummy": _plain,
    "liars_dice": _liars_dice,
    "leduc_poker": _leduc_poker,
    "othello": _coloured("x (Black)", "o (White)"),
    "clobber": _coloured("o (White)", "x (Black)"),
    "goofspiel": _goofspiel,
}
