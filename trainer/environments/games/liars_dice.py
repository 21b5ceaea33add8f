"""Liar's dice, solved for players who see what the prompt shows: their seat, their dice and the last bid.

Counterfactual regret minimisation (CFR+) over all pairs of hands at once. A player's information merges all
bids before the last one, so the weight of an opponent's hand is its reach under both players' play, own moves
with a small chance of any other. The label of a state is one of the average strategy's likeliest actions,
drawn once by a fixed number of the state: each state has one, and over all hands they mix.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations_with_replacement, pairwise
from math import factorial
from typing import TypeAlias

import numba
import numpy as np
import numpy.typing as npt
import pyspiel

from trainer.environments.games import BoardGame, Player, rules_beside

FACES, DICE = 6, 5
BIDS = FACES * 2 * DICE
LIAR = BIDS
ITERATIONS = 120
#: A bid is at most so much higher than the last one, and none has a quantity above the limit.
_STEP, _HIGHEST = 14, 8 * FACES
#: Before the first bid, the state is that of a bid lower than all.
_NO_BID = 0
#: The chance of any other own move in the weights of hands.
_TREMBLE = 0.05
#: Of the likeliest action's chance: less likely actions are no labels.
NEARLY = 0.8

Floats: TypeAlias = npt.NDArray[np.float32]

HANDS: list[tuple[int, ...]] = list(combinations_with_replacement(range(1, FACES + 1), DICE))
_HAND_INDEX = {hand: index for index, hand in enumerate(HANDS)}


def _chance(hand: tuple[int, ...]) -> float:
    ways = factorial(DICE)
    for number in Counter(hand).values():
        ways //= factorial(number)
    return ways / FACES**DICE


CHANCES = np.array([_chance(hand) for hand in HANDS], dtype=np.float32)
#: How many dice of a hand count for a face; sixes count for all.
COUNTS = np.array(
    [[sum(die in (face, FACES) for die in hand) for face in range(1, FACES + 1)] for hand in HANDS],
    dtype=np.int64,
)
#: By bid and the bidder's and the other's hand: whether the bid holds.
HOLDS = np.array(
    [COUNTS[:, bid % FACES][:, None] + COUNTS[:, bid % FACES][None, :] > bid // FACES for bid in range(BIDS)]
)


@numba.njit
def allowed(last):  # type: ignore[no-untyped-def]
    """The range of own bids in a state; calling liar is always one more, but before the first bid."""
    return last, max(min(last + _STEP, _HIGHEST), min(last + 1, BIDS))


@numba.njit
def _match(regrets, strategy):  # type: ignore[no-untyped-def]
    """Regret matching in each state and hand."""
    for last in range(BIDS + 1):
        low, high = allowed(last)
        liar = last > _NO_BID
        for hand in range(regrets.shape[1]):
            total = np.float32(0.0)
            for action in range(low, high):
                total += regrets[last, hand, action]
            if liar:
                total += regrets[last, hand, LIAR]
            if total > 0:
                for action in range(low, high):
                    strategy[last, hand, action] = regrets[last, hand, action] / total
                if liar:
                    strategy[last, hand, LIAR] = regrets[last, hand, LIAR] / total
            elif liar:
                strategy[last, hand, :] = 0
                strategy[last, hand, LIAR] = 1
            else:
                strategy[last, hand, low:high] = np.float32(1.0 / (high - low))


@numba.njit(nogil=True, fastmath=True)
def _improve(first, begin, end, own, other, regrets, average, weight, chances, holds):  # type: ignore[no-untyped-def]
    """One step for hands begin to end of a player, against the other's fixed strategy.

    `other` is by state, action and hand; `first` tells whether the player opens.
    """
    hands = len(chances)
    reach = np.zeros((BIDS + 1, hands), dtype=np.float32)
    after = np.zeros((BIDS, hands), dtype=np.float32)
    values = np.zeros((BIDS + 1, hands), dtype=np.float32)
    bid_reach = np.zeros(hands, dtype=np.float32)
    for hand in range(begin, end):
        reach[:] = 0
        if first:
            reach[_NO_BID] = chances
        else:
            low, high = allowed(_NO_BID)
            for bid in range(low, high):
                reach[bid + 1] = chances * other[_NO_BID, bid]
        # Forward: own bids in ascending order, each after all states below it.
        for bid in range(BIDS):
            bid_reach[:] = 0
            for last in range(max(0, bid - _STEP), bid + 1):
                low, high = allowed(last)
                if low <= bid < high and (first or last > _NO_BID):
                    share = (1 - _TREMBLE) * own[last, hand, bid] + _TREMBLE / (high - low + 1)
                    bid_reach += reach[last] * np.float32(share)
            low, high = allowed(bid + 1)
            for answer in range(low, high):
                reach[answer + 1] += bid_reach * other[bid + 1, answer]
        # Backward: what each own bid and each state is worth against each hand.
        for last in range(BIDS, -1, -1):
            low, high = allowed(last)
            values[last] = 0
            if last > _NO_BID:
                liar = own[last, hand, LIAR]
                for g in range(hands):
                    values[last, g] = -liar if holds[last - 1, hand, g] else liar
            for bid in range(low, high):
                share = own[last, hand, bid]
                if share > 0:
                    values[last] += share * after[bid]
            if last > _NO_BID:
                bid = last - 1
                low, high = allowed(last)
                for g in range(hands):
                    doubt = other[last, LIAR, g]
                    after[bid, g] = doubt if holds[bid, hand, g] else -doubt
                for answer in range(low, high):
                    after[bid] += other[last, answer] * values[answer + 1]
        for last in range(BIDS + 1):
            if last == _NO_BID and not first:
                continue
            low, high = allowed(last)
            seen = reach[last]
            mass = seen.sum()
            if mass <= 0:
                continue
            base = (seen * values[last]).sum()
            for bid in range(low, high):
                gain = (seen * after[bid]).sum() - base
                regrets[last, hand, bid] = max(regrets[last, hand, bid] + gain, np.float32(0))
            if last > _NO_BID:
                gain = -base
                for g in range(hands):
                    gain += -seen[g] if holds[last - 1, hand, g] else seen[g]
                regrets[last, hand, LIAR] = max(regrets[last, hand, LIAR] + gain, np.float32(0))
            average[last, hand] += np.float32(weight) * own[last, hand] * mass


def solve(iterations: int = ITERATIONS) -> Floats:
    """Return the average strategy by seat, state, hand and action."""
    shape = (2, BIDS + 1, len(HANDS), BIDS + 1)
    regrets, strategy, average = (np.zeros(shape, dtype=np.float32) for _ in range(3))
    for seat in range(2):
        _match(regrets[seat], strategy[seat])
    workers = len(os.sched_getaffinity(0))
    edges = np.linspace(0, len(HANDS), workers + 1).astype(int)
    with ThreadPoolExecutor(workers) as pool:
        for iteration in range(iterations):
            for seat in range(2):
                other = np.ascontiguousarray(strategy[1 - seat].transpose(0, 2, 1))
                sums = (regrets[seat], average[seat], float(iteration + 1))
                fixed = (strategy[seat], other, *sums, CHANCES, HOLDS)
                for job in [pool.submit(_improve, seat == 0, a, b, *fixed) for a, b in pairwise(edges)]:
                    job.result()
                _match(regrets[seat], strategy[seat])
    total = average.sum(axis=-1, keepdims=True)
    return np.where(total > 0, average / np.maximum(total, 1e-30), strategy)


def labels(strategy: Floats) -> npt.NDArray[np.int64]:
    """Return one action by seat, state and hand: of those nearly as likely as the likeliest."""
    least = NEARLY * strategy.max(axis=-1, keepdims=True)
    bounds = np.where(strategy >= least, strategy, 0.0).cumsum(axis=-1, dtype=np.float64)
    seats, states, hands = np.indices(strategy.shape[:3])
    # Fractions of multiples of irrational numbers: spread evenly over the hands of a state.
    points = (seats * 2**0.5 + states * 3**0.5 + (hands + 1) * (5**0.5 - 1) / 2) % 1.0
    return (bounds <= (points * bounds[..., -1])[..., None]).sum(axis=-1)


@functools.cache
def solved(iterations: int = ITERATIONS) -> npt.NDArray[np.int64]:
    return labels(solve(iterations))


def situation(state: pyspiel.State) -> tuple[int, int, int]:
    """Return seat, state and hand of the player to move, as indices of the solution."""
    player = state.current_player()
    dice, *bids = state.information_state_string(player).split()
    bids = [bid for bid in bids if "-" in bid]
    last = 0
    if bids:
        quantity, face = bids[-1].split("-")
        last = (int(quantity) - 1) * FACES + int(face)
    return player, last, _HAND_INDEX[tuple(sorted(int(die) for die in dice))]


class LiarsDicePlayer(Player):
    def __init__(self, iterations: int = ITERATIONS) -> None:
        self._iterations = iterations

    def choose(self, state: pyspiel.State) -> int:
        return int(solved(self._iterations)[situation(state)])

    def note(self, state: pyspiel.State) -> str | None:
        """Return the bids of this turn: the prompt shows only the last one."""
        _, last, _ = situation(state)
        action = self.choose(state)
        if action == LIAR:
            return None
        before = f"Opponent bid {_text(last - 1)}. " if last != _NO_BID else ""
        return f"{before}I bid {_text(action)}."


def _text(bid: int) -> str:
    return f"{bid // FACES + 1}-{bid % FACES + 1}"


def observe(state: pyspiel.State, player: int) -> str:
    """Word a state as the evaluator does."""
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


GAME = BoardGame(
    name="liars_dice",
    tasks=(100_000_000, 199_999_999),
    rules=rules_beside(__file__),
    advice="count own dice and wild sixes, bid what is likely, call a bid above what dice allow",
    player=LiarsDicePlayer,
    observe=observe,
    variants=({"players": 2, "numdice": DICE},),
    simulations=225,
)
