"""Leduc poker where only who wins counts, not how much.

A fold always loses, and a hand that is played on wins or draws at times. So never folding is at least as good
as folding in every information state, whatever the opponent does: a pair of players who never fold is an
equilibrium of win, draw and loss. Among those, raise whenever allowed: it gives opponents who play for chips
the most chances to fold.
"""

from __future__ import annotations

import re

import pyspiel

from trainer.environments.games import BoardGame, Player, rules_beside

FOLD, CALL, RAISE = 0, 1, 2
_ACTIONS = {"0": "Fold", "1": "Call", "2": "Raise"}
_NO_CARD = "-10000"


class LeducPlayer(Player):
    def choose(self, state: pyspiel.State) -> int:
        return RAISE if RAISE in state.legal_actions() else CALL


def observe(state: pyspiel.State, player: int) -> str:
    """Word a state as the evaluator does."""
    # "[Observer: 0][Private: 2][Round 1][Player: 0][Pot: 2][Money: 99 99][Public: 3][Round1: 1 1][Round2: ]"
    text = state.information_state_string(player)
    facts = dict(re.findall(r"\[(\w+):? ([^\]]*)\]", text))
    private, public = facts.get("Private", _NO_CARD), facts.get("Public", _NO_CARD)
    lines = [f"Your card: {_card(private) if private != _NO_CARD else '(not dealt yet)'}"]
    if public != _NO_CARD:
        lines.append(f"Public card: {_card(public)}")
        if private != _NO_CARD and int(private) // 2 == int(public) // 2:
            lines.append("Hand: PAIR")
    lines += [f"Round: {facts['Round']}/2", f"Pot: {facts['Pot']} chips"]
    chips = facts["Money"].split()
    lines += [f"Your chips: {chips[player]}", f"Opponent chips: {chips[1 - player]}"]
    for number in (1, 2):
        if actions := facts.get(f"Round{number}", "").split():
            lines.append(f"Round {number} actions: {', '.join(_ACTIONS[action] for action in actions)}")
    return "\n".join(lines)


def _card(card: str) -> str:
    rank, suit = divmod(int(card), 2)
    return f"{'JQK'[rank]}{'♠♥'[suit]}"


GAME = BoardGame(
    name="leduc_poker",
    tasks=(200_000_000, 299_999_999),
    rules=rules_beside(__file__),
    advice="never fold, raise whenever it is legal",
    player=LeducPlayer,
    observe=observe,
    variants=({"players": 2},),
)
