"""Expert players, one module a game: what the model imitates."""

from __future__ import annotations

import importlib
from typing import Protocol

import pyspiel

#: The class of a game's player, by the game's name, which is its module's name as well.
_CLASSES = {
    "gin_rummy": "GinRummyPlayer",
    "liars_dice": "LiarsDicePlayer",
    "leduc_poker": "LeducPlayer",
    "othello": "OthelloPlayer",
    "clobber": "ClobberPlayer",
    "goofspiel": "GoofspielPlayer",
}


class Player(Protocol):
    """One action for each information state of the player to move: nothing else has any influence."""

    def choose(self, state: pyspiel.State) -> int:
        """Return a legal action of the player to move."""
        ...

    def note(self, state: pyspiel.State) -> str | None:
        """Return what the player to move should write into its memory this turn, if anything."""
        return None


def player_for(game: str) -> Player:
    """Return the expert for this game. Its first choice compiles and solves: make it before forking."""
    try:
        name = _CLASSES[game]
    except KeyError:
        raise ValueError(f"no player for {game!r}; there are {', '.join(sorted(_CLASSES))}") from None
    player: Player = getattr(importlib.import_module(f"{__name__}.{game}"), name)()
    return player
