"""Monte Carlo tree search as the evaluator's baseline plays it, in OpenSpiel's C++ engine.

It clones the true state and so sees hidden cards and bids: an opponent to practise against, not a teacher.
"""

from __future__ import annotations

import pyspiel

UCT = 2.0
ROLLOUTS = 1
#: A tree of a few hundred simulations is far smaller.
_MEMORY_MB = 64


class MctsPlayer:
    """Plays one game: the search depends on the game's parameters."""

    def __init__(self, game: pyspiel.Game, simulations: int, seed: int) -> None:
        evaluator = pyspiel.RandomRolloutEvaluator(ROLLOUTS, seed)
        solve, verbose = True, False
        self._bot = pyspiel.MCTSBot(game, evaluator, UCT, simulations, _MEMORY_MB, solve, seed, verbose)

    def choose(self, state: pyspiel.State) -> int:
        return int(self._bot.step(state))

    def note(self, state: pyspiel.State) -> str | None:
        return None
