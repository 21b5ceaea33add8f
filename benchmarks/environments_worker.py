"""Runs inside the training environment, for `environments.py`: plays, and computes best responses."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pyspiel

from benchmarks import exploitability
from trainer.environments import games
from trainer.environments.games import Player, board_game
from trainer.environments.games.goofspiel import known
from trainer.environments.games.leduc_poker import LeducPlayer
from trainer.environments.selfplay import MctsPlayer

BASE_SEED = 20_260_701


class PrizePlayer(Player):
    """Goofspiel's plainest rule, for comparison: bid what the prize is worth."""

    def choose(self, state: pyspiel.State) -> int:
        return known(state).prize - 1


def processor_s() -> float:
    """User and system time of this process and of those that it forked."""
    return sum(os.times()[:4])


class Clock:
    """Processor time of choices, and their number."""

    def __init__(self, player: Player) -> None:
        self.player, self.seconds, self.choices = player, 0.0, 0
        # Exact to nanoseconds, but without forked processes, or exact to hundredths of a second.
        self._now = processor_s if isinstance(player, MctsPlayer) else time.process_time

    def choose(self, state: pyspiel.State) -> int:
        began = self._now()
        action = self.player.choose(state)
        self.seconds += self._now() - began
        self.choices += 1
        return action


def played(name: str, game_name: str, made: Callable[[], Player], seeds: int) -> dict[str, Any]:
    began = time.process_time()
    player = made()
    _play_alone(game_name, player)
    start = time.process_time() - began
    expert, search_s, seats = Clock(player), 0.0, [0.0, 0.0]
    for seed in islice(games.seeds(BASE_SEED), seeds):
        game = games.load(game_name, games.variant_of(game_name, seed))
        for seat in range(2):
            search = Clock(MctsPlayer(game, games.board_game(game_name).simulations, seed + 1 - seat))
            state, deals = games.opened(game, seed), games.dealer(seed)
            while not state.is_terminal():
                games.deal(state, deals)
                # A gin player who knocks with melds alone has no discard: the evaluator calls that a draw.
                if not state.is_terminal() and not state.legal_actions():
                    break
                if not state.is_terminal():
                    mover = expert if state.current_player() == seat else search
                    state.apply_action(mover.choose(state))
            search_s += search.seconds
            ended = (
                games.outcome(game, list(state.returns()), seat)
                if state.is_terminal()
                else games.GameOutcome.DRAW
            )
            seats[seat] += {
                games.GameOutcome.WIN: 1.0,
                games.GameOutcome.DRAW: 0.5,
                games.GameOutcome.LOSS: 0.0,
            }[ended]
    return {
        "name": name,
        "game": game_name,
        "seeds": seeds,
        "seats": seats,
        "labels": expert.choices,
        "label_s": expert.seconds,
        "search_s": search_s,
        "start_s": start,
    }


def _play_alone(game_name: str, player: Player) -> None:
    state, deals = games.opened(games.load(game_name, 0), 0), games.dealer(0)
    games.deal(state, deals)
    while not state.is_terminal():
        state.apply_action(player.choose(state))
        games.deal(state, deals)


def measured(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in asked["games"]:
        yield played(name, name, board_game(name).player, asked["seeds"])
        if name == "leduc_poker":
            worth = exploitability.of_leduc(LeducPlayer())
            yield {"text": f"leduc_poker: exploitability {worth:.4f} on win and loss (bar: 0.01), exact."}
        elif name == "liars_dice":
            mixed, labels = exploitability.of_liars_dice()
            yield {
                "text": f"liars_dice: exploitability {labels:.3f} of the labels, {mixed:.3f} of the solution "
                "they are drawn from (bar: 0.4), by the best responder found among those who know all of "
                "it and see what the prompt shows.",
                "labels": labels,
                "mixed": mixed,
            }
        elif name == "goofspiel":
            yield played("bid = prize", name, PrizePlayer, asked["seeds"])
            worth = exploitability.first_seat_seen(5)
            yield {
                "text": f"goofspiel's bound, 5 cards: a first seat whose bids are seen gets {worth:.0%} "
                f"of games against exact play even if it sees past bids; both at most {worth / 2 + 0.5:.0%}."
            }


if __name__ == "__main__":
    for line in measured(json.loads(sys.argv[1])):
        print(json.dumps(line), flush=True)
