"""Games that are played to be learned from: decisions with the expert's answer to each.

An expert that only meets itself shows no model how to go on after a mistake. So it plays against the
evaluator's tree search and against itself, and in a part of the games some moves of both seats are random:
every state is labelled by the expert, however it came about. Memory is part of the request: experts leave
notes in it, half of the games begin with old notes or noise in the slots, and the reflection that the
evaluator asks for after a game is a row as well.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pyspiel

from core.domain.tasks import PVP_GAMES
from trainer.environments.games import (
    GameOutcome,
    Player,
    board_game,
    deal,
    dealer,
    load,
    opened,
    outcome,
    returns_of,
    variant_of,
)
from trainer.environments.memory import SLOTS, Area, Memory
from trainer.environments.prompts import memory_tools, reflection_messages, tools, turn_messages
from trainer.environments.tool_calls import ToolCall, assistant_message, game_action, template_tools

UCT = 2.0
ROLLOUTS = 1
#: A tree of a few hundred simulations is far smaller.
_MEMORY_MB = 64
_CRASHES = ("gin_rummy",)
_ATTEMPTS = 5
#: Keeps the seeds of a game's searches apart.
_STEP = 1_000_003
#: Of the games: expert against search, and against itself. In the others both seats make random moves too.
_SEARCH, _ITSELF = 0.5, 0.2
#: How many of the moves are random in those.
_RANDOM_MOVES = (0.1, 0.25, 0.5)
#: Of the moves that search makes, so many are answered by the expert too.
_OTHERS_MOVES = 0.3
#: Seats that keep notes, games with something in the slots before, and games that are reflected on.
_NOTES, _FILLED, _REFLECTED = 0.3, 0.5, 0.1
#: A slot of notes is restarted before it is cut: its tokens are the tokenizer's, which no worker has.
_SLOT_CHARACTERS = 240
#: Mostly the evaluator's own number of simulations, and weaker search, which leads elsewhere.
_WEAKER = (1.0, 1.0, 0.5, 0.2)
_WORDS = (  # noqa: SIM905 - as a list it fills a page
    "opponent plays bids calls raises often early late high low safe bold corner center edge pair set run "
    "knock draw discard card prize dice move turn round lead follow never always sometimes waits bluffs"
).split()


class MctsPlayer:
    """Plays one game by Monte Carlo tree search as the evaluator's baseline does, in OpenSpiel's C++.

    The search depends on the game's parameters. It clones the true state and so sees hidden cards and bids:
    an opponent to practise against, not a teacher.

    OpenSpiel 2.0.2 lets a gin rummy player knock with a hand that is all melds, and then offers no discard. A
    search that comes to such a state ends its process, about once in 200 games: such searches are forked.
    """

    def __init__(self, game: pyspiel.Game, simulations: int, seed: int) -> None:
        self._game, self._simulations, self._seed = game, simulations, seed
        self._bot = None if game.get_type().short_name in _CRASHES else self._searching(seed)

    def choose(self, state: pyspiel.State) -> int:
        if self._bot is not None:
            return int(self._bot.step(state))
        seed = (self._seed + _STEP * state.move_number()) % (1 << 30)
        for attempt in range(_ATTEMPTS):
            action = _forked(partial(self._search, state, seed + attempt))
            if action is not None:
                return action
        legal: list[int] = state.legal_actions()
        return legal[seed % len(legal)]

    def note(self, state: pyspiel.State) -> str | None:
        return None

    def _search(self, state: pyspiel.State, seed: int) -> int:
        return int(self._searching(seed).step(state))

    def _searching(self, seed: int) -> pyspiel.MCTSBot:
        evaluator = pyspiel.RandomRolloutEvaluator(ROLLOUTS, seed)
        solve, verbose = True, False
        return pyspiel.MCTSBot(
            self._game, evaluator, UCT, self._simulations, _MEMORY_MB, solve, seed, verbose
        )


def _forked(call: Callable[[], int]) -> int | None:
    """The number that a call returns in a process of its own, or nothing if that process ends without."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()
            os.write(writing, str(call()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return int(answer) if answer else None


@dataclass
class Seat:
    """One side of a game: who moves, what is remembered, and which of its decisions become rows."""

    player: Player
    memory: Memory
    share: float
    keeps_notes: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)


class GameSource:
    """Rows of one game: a seed is a game."""

    def __init__(self, name: str, expert: Player | None = None) -> None:
        self.name = name
        self._game = board_game(name)
        self._expert = expert
        self._system_tools = json.dumps(template_tools(memory_tools()))

    def get_ready(self) -> None:
        """The expert's first choice solves and compiles."""
        _all_advice()
        self._expert = self._expert or self._game.player()
        for variant in range(len(self._game.variants)):
            state = opened(load(self.name, variant), variant)
            deal(state, dealer(variant))
            self._expert.choose(state)

    def rows(self, seed: int) -> Sequence[Mapping[str, Any]]:
        chance = random.Random(f"{self.name} {seed}")  # noqa: S311 - games, no secrets
        drawn = chance.randrange(1, 1_000_000)
        game = load(self.name, variant_of(self.name, drawn))
        state, draw = opened(game, drawn), dealer(drawn)
        seats, at_random = self._seats(game, chance)
        deal(state, draw)
        while (returns := returns_of(state)) is None:
            seat = seats[state.current_player()]
            action = self._moved(state, seat, chance)
            if chance.random() < at_random:
                action = chance.choice(state.legal_actions())
            state.apply_action(action)
            deal(state, draw)
        if chance.random() < _REFLECTED:
            for player, seat in enumerate(seats):
                if seat.share == 1:
                    ended = outcome(game, returns, player)
                    seat.rows.append(self._reflection(state, player, seat, ended))
        return [row for seat in seats for row in seat.rows]

    def _seats(self, game: pyspiel.Game, chance: random.Random) -> tuple[tuple[Seat, Seat], float]:
        """And how many of all moves are random."""
        expert = self._expert
        assert expert is not None
        kind = chance.random()
        seats = [self._seat(expert, 1.0, chance), self._seat(expert, 1.0, chance)]
        if kind < _SEARCH or (kind >= _SEARCH + _ITSELF and chance.random() < 0.5):
            simulations = max(round(self._game.simulations * chance.choice(_WEAKER)), 2)
            search = MctsPlayer(game, simulations, chance.randrange(2**31))
            seats[chance.randrange(2)] = self._seat(search, _OTHERS_MOVES, chance)
        at_random = 0.0 if kind < _SEARCH + _ITSELF else chance.choice(_RANDOM_MOVES)
        return (seats[0], seats[1]), at_random

    def _seat(self, player: Player, share: float, chance: random.Random) -> Seat:
        memory = Memory()
        if chance.random() < _FILLED:
            fill(memory, chance)
        return Seat(player, memory, share, share == 1 and chance.random() < _NOTES)

    def _moved(self, state: pyspiel.State, seat: Seat, chance: random.Random) -> int:
        """The seat's own move; a row of the expert's where it is wanted."""
        assert self._expert is not None
        wanted = chance.random() < seat.share
        label = self._expert.choose(state) if wanted or seat.share == 1 else None
        if label is not None and wanted:
            note = self._expert.note(state) if seat.keeps_notes else None
            notes = [_noted(seat.memory, note)] if note else []
            seat.rows.append(self._turn(state, label, seat.memory, notes))
            for one in notes:
                seat.memory.apply(one.name, one.arguments)
        return label if seat.share == 1 and label is not None else seat.player.choose(state)

    def _turn(
        self, state: pyspiel.State, label: int, memory: Memory, notes: Sequence[ToolCall]
    ) -> dict[str, Any]:
        player = state.current_player()
        answer = assistant_message([*notes, game_action(label)], "")
        return {
            "messages": [*turn_messages(self.name, state, player, memory), answer],
            "tools": json.dumps(template_tools(tools(state.legal_actions(player)))),
        }

    def _reflection(
        self, state: pyspiel.State, player: int, seat: Seat, ended: GameOutcome
    ) -> dict[str, Any]:
        """The first empty slot gets what is worth keeping; if none is empty, the first."""
        slots = seat.memory.slots[Area.LONG_TERM]
        slot = slots.index("") + 1 if "" in slots else 1
        text = f"{ended.capitalize()} as Player {player}. Keep to it: {self._game.advice}."
        call = ToolCall("long_term_memory_rewrite", {"slot": slot, "content": text})
        messages = reflection_messages(self.name, state, player, seat.memory, ended)
        return {"messages": [*messages, assistant_message([call], "")], "tools": self._system_tools}


def _noted(memory: Memory, note: str) -> ToolCall:
    """Into the first slot of the game's own, after what is there as long as it is short."""
    old = memory.slots[Area.WORKING][0]
    short = len(old) + len(note) < _SLOT_CHARACTERS
    return ToolCall(f"working_memory_{'append' if short else 'rewrite'}", {"slot": 1, "content": note})


def fill(memory: Memory, chance: random.Random) -> None:
    """Put into some slots what a model may have left there: advice, fragments of notes, noise."""
    for area in Area:
        count = chance.randint(0, SLOTS[area])
        for slot in chance.sample(range(1, SLOTS[area] + 1), count):
            memory.rewrite(area, slot, _filling(chance))


@cache
def _all_advice() -> list[str]:
    return [board_game(name).advice for name in PVP_GAMES]


def _filling(chance: random.Random) -> str:
    kind = chance.random()
    if kind < 0.3:
        return f"{chance.choice(('Win', 'Loss', 'Draw'))}. {chance.choice(_all_advice()).capitalize()}."
    if kind < 0.8:
        return " ".join(chance.choice(_WORDS) for _ in range(chance.randint(3, 25))).capitalize() + "."
    return " ".join(str(chance.randrange(1000)) for _ in range(chance.randint(3, 15)))
