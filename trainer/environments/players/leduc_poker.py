"""Leduc poker where only who wins counts, not how much.

A fold always loses, and a hand that is played on wins or draws at times. So never folding is at least as good
as folding in every information state, whatever the opponent does: a pair of players who never fold is an
equilibrium of win, draw and loss. Among those, raise whenever allowed: it gives opponents who play for chips
the most chances to fold.
"""

from __future__ import annotations

import pyspiel

from trainer.environments.players import Player

FOLD, CALL, RAISE = 0, 1, 2


class LeducPlayer(Player):
    def choose(self, state: pyspiel.State) -> int:
        return RAISE if RAISE in state.legal_actions() else CALL
