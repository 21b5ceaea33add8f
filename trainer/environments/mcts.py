"""Monte Carlo tree search as the evaluator's baseline plays it, in OpenSpiel's C++ engine.

It clones the true state and so sees hidden cards and bids: an opponent to practise against, not a teacher.

OpenSpiel 2.0.2 lets a gin rummy player knock with a hand that is all melds, and then offers no discard. A
search that comes to such a state ends its process, about once in 200 games: such searches are forked.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable
from functools import partial

import pyspiel

UCT = 2.0
ROLLOUTS = 1
#: A tree of a few hundred simulations is far smaller.
_MEMORY_MB = 64
_CRASHES = ("gin_rummy",)
_ATTEMPTS = 5
#: Keeps the seeds of a game's searches apart.
_STEP = 1_000_003


class MctsPlayer:
    """Plays one game: the search depends on the game's parameters."""

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
