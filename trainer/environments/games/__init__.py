"""The games between two players: a module for each, and what all share, as the evaluator draws it.

A game's module is named after it and has its rules in a text file beside it. It declares the game as `GAME`.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from core.domain.tasks import PVP_GAMES
from core.domain.tournament_rules import MATCH
from trainer.errors import BadData

if TYPE_CHECKING:
    import numpy as np
    import pyspiel

#: What OpenSpiel calls a game whose simultaneous moves are made one after the other.
_TURN_BASED = "turn_based_simultaneous_game"
#: Seeds of games are drawn from 1 to here, and variants are task ids modulo `_VARIANTS`.
LAST_SEED = 1_000_000
_VARIANTS = 100_000_000
#: Random moves before a game of bare boards.
OPENING_PLIES = (2, 6)


class UnknownGame(BadData):
    """No game has this name."""

    code = "unknown_game"


class GameOutcome(StrEnum):
    """The end of a game for one player, in the word that the evaluator shows to it in capitals."""

    WIN = "win"
    LOSS = "loss"
    DRAW = "draw"

    def other(self) -> GameOutcome:
        """Return the opponent's outcome."""
        return {GameOutcome.WIN: GameOutcome.LOSS, GameOutcome.LOSS: GameOutcome.WIN}.get(
            self, GameOutcome.DRAW
        )


class Player(Protocol):
    """One action for each information state of the player to move: nothing else has any influence."""

    def choose(self, state: pyspiel.State) -> int:
        """Return a legal action of the player to move."""
        ...

    def note(self, state: pyspiel.State) -> str | None:
        """Return what the player to move should write into its memory this turn, if anything."""
        return None


#: Words a state as the evaluator shows it to a player.
Observer = Callable[["pyspiel.State", int], str]


def plain(state: pyspiel.State, player: int) -> str:
    """Word a state as OpenSpiel does."""
    return str(state.observation_string(player))


def coloured(first: str, second: str) -> Observer:
    """Word a state as OpenSpiel does, after the colour of the player."""

    def seen(state: pyspiel.State, player: int) -> str:
        return f"You play {second if player else first}.\n{state.observation_string(player)}"

    return seen


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardGame:
    """Facts that the evaluator fixes for one game, and our player of it."""

    name: str
    #: First and last of the game's task ids.
    tasks: tuple[int, int]
    #: The rules as the evaluator words them.
    rules: str
    #: What a reflection on a game says to keep to.
    advice: str
    #: Makes the expert that models imitate. Its first choice compiles and solves: make it before forking.
    player: Callable[[], Player]
    observe: Observer = plain
    #: OpenSpiel's parameters, by variant.
    variants: Sequence[Mapping[str, Any]] = ({},)
    #: Simulations of the MCTS player that models are compared with before a task.
    simulations: int = 50
    #: Smallest and largest number of random moves before the models take over.
    opening_plies: tuple[int, int] | None = None
    simultaneous: bool = False
    evaluation_seconds: float = MATCH.seconds


def rules_beside(module: str) -> str:
    """Read the rules of a game from the text file beside its module."""
    return Path(module).with_suffix(".txt").read_text("utf-8")


def board_game(name: str) -> BoardGame:
    """Return a game, from its module in this package; raise `UnknownGame`."""
    if name not in PVP_GAMES:
        raise UnknownGame(f"{name!r} is not a known game; known games: {', '.join(PVP_GAMES)}")
    game: BoardGame = importlib.import_module(f"{__name__}.{name}").GAME
    return game


def seeds(base_seed: int) -> Iterator[int]:
    """Iterate over the seeds of the games of a match, without an end."""
    draw = random.Random(base_seed)  # noqa: S311 - as the evaluator
    while True:
        yield draw.randint(1, LAST_SEED)


def variant_of(name: str, seed: int) -> int:
    """Return the variant of the game with this seed."""
    return random.Random(seed).randint(*board_game(name).tasks) % _VARIANTS  # noqa: S311 - as the evaluator


def load(name: str, variant: int) -> pyspiel.Game:
    """Return OpenSpiel's game in this variant."""
    import pyspiel

    game = board_game(name)
    loaded = pyspiel.load_game(name, dict(game.variants[variant % len(game.variants)]))
    return pyspiel.convert_to_turn_based(loaded) if game.simultaneous else loaded


def name_of(game: pyspiel.Game) -> str:
    """Return the evaluator's name of a loaded game."""
    short = str(game.get_type().short_name)
    return str(game.get_parameters()["game"]["name"]) if short == _TURN_BASED else short


def opened(game: pyspiel.Game, seed: int) -> pyspiel.State:
    """Return a new state, after the random opening of this seed if the game has one."""
    state = game.new_initial_state()
    plies = board_game(name_of(game)).opening_plies
    if plies is None:
        return state
    draw = random.Random(seed)  # noqa: S311 - as the evaluator
    for _ in range(draw.randint(*plies)):
        if state.is_terminal():
            break
        state.apply_action(draw.choice(state.legal_actions()))
    return state


def dealer(seed: int) -> np.random.RandomState:
    """Return the generator that draws the dice and cards of the game with this seed."""
    import numpy as np

    return np.random.RandomState(seed)


def deal(state: pyspiel.State, draw: np.random.RandomState) -> None:
    """Draw dice and cards until a player has to move or the game is over."""
    while state.is_chance_node():
        outcomes, chances = zip(*state.chance_outcomes(), strict=True)
        state.apply_action(draw.choice(outcomes, p=chances))


def returns_of(state: pyspiel.State) -> list[float] | None:
    """Return the returns of a game that is over, or None before its end, after dice and cards were drawn.

    OpenSpiel allows a knock in gin rummy after which no action is legal: the evaluator counts a draw."""
    if state.is_terminal():
        return list(state.returns())
    return None if state.legal_actions() else [0.0, 0.0]


def outcome(game: pyspiel.Game, returns: list[float], player: int) -> GameOutcome:
    """Return the outcome of these returns for a player: more than half of the range is a win."""
    import pyspiel

    mine, other = returns[player], returns[1 - player]
    if game.get_type().utility == pyspiel.GameType.Utility.ZERO_SUM:
        low, high = game.min_utility(), game.max_utility()
        # Divided as the evaluator does: a sum of halves rounds otherwise.
        mine, other = ((mine - low) / (high - low), 0.5) if high > low else (0.5, 0.5)
    return GameOutcome.WIN if mine > other else GameOutcome.LOSS if mine < other else GameOutcome.DRAW


def forfeited(game: pyspiel.Game, loser: int) -> list[float]:
    """Return the returns of a game that a player forfeits."""
    returns = [float(game.max_utility())] * 2
    returns[loser] = float(game.min_utility())
    return returns
