"""The six games between two players: parameters, variants and openings as the evaluator draws them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from trainer.errors import BadData

if TYPE_CHECKING:
    import numpy as np
    import pyspiel

#: What OpenSpiel calls a game whose simultaneous moves are made one after the other.
TURN_BASED = "turn_based_simultaneous_game"
#: Seeds of games are drawn from 1 to here, and variants are task ids modulo `_VARIANTS`.
LAST_SEED = 1_000_000
_VARIANTS = 100_000_000
_OPENING_PLIES = (2, 6)
_CLOBBER_BOARDS = ((4, 5), (5, 5), (5, 6))
_GOOFSPIEL_CARDS = (5, 8, 10, 13)


class UnknownGame(BadData):
    """A name of no game that we know."""

    code = "unknown_game"


class GameOutcome(StrEnum):
    """How a game ends for one player, in the word that the evaluator shows to it in capitals."""

    WIN = "win"
    LOSS = "loss"
    DRAW = "draw"

    def other(self) -> GameOutcome:
        """How it ends for the opponent."""
        return {GameOutcome.WIN: GameOutcome.LOSS, GameOutcome.LOSS: GameOutcome.WIN}.get(
            self, GameOutcome.DRAW
        )


@dataclass(frozen=True, slots=True)
class BoardGame:
    """What the evaluator fixes for one game."""

    name: str
    #: Of its task ids, both ends included.
    first_task: int
    last_task: int
    #: OpenSpiel's parameters for a variant.
    parameters: Callable[[int], Mapping[str, Any]]
    #: How many variants differ.
    variants: int = 1
    #: Simulations of the MCTS player that models are compared with before a task.
    simulations: int = 50
    #: Smallest and largest number of random moves before the models take over.
    opening_plies: tuple[int, int] | None = None
    simultaneous: bool = False
    evaluation_seconds: float = 900.0


_GAMES = (
    BoardGame(
        "gin_rummy",
        300_000_000,
        399_999_999,
        lambda variant: {"hand_size": 7 + variant // 3 % 3, "knock_card": 10 - variant % 3},
        variants=9,
    ),
    BoardGame(
        "liars_dice",
        100_000_000,
        199_999_999,
        lambda _: {"players": 2, "numdice": 5},
        simulations=225,
    ),
    BoardGame("leduc_poker", 200_000_000, 299_999_999, lambda _: {"players": 2}),
    BoardGame("othello", 400_000_000, 499_999_999, lambda _: {}, opening_plies=_OPENING_PLIES),
    BoardGame(
        "clobber",
        700_000_000,
        799_999_999,
        lambda variant: dict(zip(("rows", "columns"), _CLOBBER_BOARDS[variant % 3], strict=True)),
        variants=3,
        opening_plies=_OPENING_PLIES,
    ),
    BoardGame(
        "goofspiel",
        0,
        99_999_999,
        lambda variant: {
            "players": 2,
            "num_cards": _GOOFSPIEL_CARDS[variant % 4],
            "imp_info": True,
            "points_order": "random",
            "returns_type": "win_loss",
        },
        variants=4,
        simultaneous=True,
    ),
)
GAMES: Mapping[str, BoardGame] = {game.name: game for game in _GAMES}


def board_game(name: str) -> BoardGame:
    """The game of that name; raise `UnknownGame`."""
    try:
        return GAMES[name]
    except KeyError:
        raise UnknownGame(f"{name!r} is no game; there are {', '.join(GAMES)}") from None


def seeds(base_seed: int) -> Iterator[int]:
    """The seeds of the games of a match, without an end."""
    draw = random.Random(base_seed)  # noqa: S311 - as the evaluator
    while True:
        yield draw.randint(1, LAST_SEED)


def variant_of(name: str, seed: int) -> int:
    """The variant that a game with this seed has."""
    game = board_game(name)
    return random.Random(seed).randint(game.first_task, game.last_task) % _VARIANTS  # noqa: S311 - as the evaluator


def load(name: str, variant: int) -> pyspiel.Game:
    """OpenSpiel's game in that variant."""
    import pyspiel

    game = board_game(name)
    loaded = pyspiel.load_game(name, dict(game.parameters(variant)))
    return pyspiel.convert_to_turn_based(loaded) if game.simultaneous else loaded


def name_of(game: pyspiel.Game) -> str:
    """The evaluator's name of a loaded game."""
    short = str(game.get_type().short_name)
    return "goofspiel" if short == TURN_BASED else short


def opened(game: pyspiel.Game, seed: int) -> pyspiel.State:
    """A new state after the random opening of that seed, where the game has one."""
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
    """What draws the dice and cards of a game with this seed."""
    import numpy as np

    return np.random.RandomState(seed)


def deal(state: pyspiel.State, draw: np.random.RandomState) -> None:
    """Draw dice and cards until a player has to move or the game is over."""
    while state.is_chance_node():
        outcomes, chances = zip(*state.chance_outcomes(), strict=True)
        state.apply_action(draw.choice(outcomes, p=chances))


def returns_of(state: pyspiel.State) -> list[float] | None:
    """The returns of a game that is over, None before; after dice and cards were drawn.

    OpenSpiel allows a knock in gin rummy after which no action is legal: the evaluator counts a draw."""
    if state.is_terminal():
        return list(state.returns())
    return None if state.legal_actions() else [0.0, 0.0]


def outcome(game: pyspiel.Game, returns: list[float], player: int) -> GameOutcome:
    """How a game with these returns ends for a player: more than half of the range is a win."""
    import pyspiel

    mine, other = returns[player], returns[1 - player]
    if game.get_type().utility == pyspiel.GameType.Utility.ZERO_SUM:
        low, high = game.min_utility(), game.max_utility()
        # Divided as the evaluator does: a sum of halves rounds otherwise.
        mine, other = ((mine - low) / (high - low), 0.5) if high > low else (0.5, 0.5)
    return GameOutcome.WIN if mine > other else GameOutcome.LOSS if mine < other else GameOutcome.DRAW


def forfeited(game: pyspiel.Game, loser: int) -> list[float]:
    """The returns of a game that a player forfeits."""
    returns = [float(game.max_utility())] * 2
    returns[loser] = float(game.min_utility())
    return returns
