"""Gin rummy: least deadwood now and after the next draw, over what the observation shows.

Knock as soon as allowed: an opponent who has not knocked holds more deadwood than the knock card. The draw
compares the upcard with the mean over all cards that may be in the stock. A discard is judged by the deadwood
it leaves, the mean after the next draw, and by how many melds of unseen cards it would complete for others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numba
import numpy as np
import pyspiel

from trainer.environments.games import BoardGame, Player, rules_beside

UPCARD, STOCK, PASS, KNOCK, MELDS = 52, 53, 54, 55, 56
_RANKS, _SUITS = "A23456789TJQK", "scdh"
_VALUES = np.array([min(1 + card % 13, 10) for card in range(52)], dtype=np.int64)
_NONE = -1
#: What one point of deadwood left now weighs against one in the mean after the next draw,
NOW = 0.5
#: and what one possible meld of the opponent's weighs.
SAFETY = 0.3


def _all_melds() -> list[int]:
    """Sets of three and four, runs of three to five: longer runs are made of these."""
    melds = []
    for rank in range(13):
        four = [rank + 13 * suit for suit in range(4)]
        melds += [sum(1 << card for card in four)]
        melds += [sum(1 << card for card in four if card != left) for left in four]
    for suit in range(4):
        for length in (3, 4, 5):
            for first in range(13 - length + 1):
                melds.append(sum(1 << (13 * suit + first + i) for i in range(length)))
    return melds


_MELDS = np.array(_all_melds(), dtype=np.int64)
_MELD_VALUES = np.array(
    [sum(int(_VALUES[card]) for card in range(52) if meld >> card & 1) for meld in _all_melds()],
    dtype=np.int64,
)
_TRIPLES = np.array([meld for meld in _all_melds() if meld.bit_count() == 3], dtype=np.int64)


@numba.njit
def _total(hand):  # type: ignore[no-untyped-def]
    total = 0
    for card in range(52):
        if hand >> card & 1:
            total += _VALUES[card]
    return total


@numba.njit
def _covered(melds, values, count, start, free):  # type: ignore[no-untyped-def]
    """The most points that melds from `start` on cover without sharing a card."""
    best = 0
    for index in range(start, count):
        meld = melds[index]
        if meld & free == meld:
            points = values[index] + _covered(melds, values, count, index + 1, free & ~meld)
            best = max(best, points)
    return best


@numba.njit
def _found(hand, melds, values):  # type: ignore[no-untyped-def]
    """Write the melds of a hand and their points; return how many."""
    count = 0
    for index in range(len(_MELDS)):
        meld = _MELDS[index]
        if meld & hand == meld:
            melds[count], values[count] = meld, _MELD_VALUES[index]
            count += 1
    return count


@numba.njit
def deadwood(hand):  # type: ignore[no-untyped-def]
    melds, values = np.empty(64, np.int64), np.empty(64, np.int64)
    count = _found(hand, melds, values)
    return _total(hand) - _covered(melds, values, count, 0, hand)


@numba.njit
def _after_discard(hand, kept):  # type: ignore[no-untyped-def]
    """The least deadwood after a discard, not of the card `kept`."""
    melds, values = np.empty(64, np.int64), np.empty(64, np.int64)
    count = _found(hand, melds, values)
    total = _total(hand)
    least = 1_000
    for card in range(52):
        if hand >> card & 1 and card != kept:
            left = hand & ~(1 << card)
            least = min(least, total - _VALUES[card] - _covered(melds, values, count, 0, left))
    return least


@numba.njit
def _after_draw(hand, unseen):  # type: ignore[no-untyped-def]
    """The mean of the least deadwood after a draw of one of these cards and a discard."""
    total = number = 0
    for card in range(52):
        if unseen >> card & 1:
            total += _after_discard(hand | (1 << card), _NONE)
            number += 1
    return total / number if number else float(deadwood(hand))


@numba.njit
def _use_to_others(card, unseen):  # type: ignore[no-untyped-def]
    melds = 0
    for index in range(len(_TRIPLES)):
        meld = _TRIPLES[index]
        if meld >> card & 1 and (meld & ~(1 << card)) & unseen == meld & ~(1 << card):
            melds += 1
    return melds


@numba.njit
def _discard(hand, unseen, kept):  # type: ignore[no-untyped-def]
    best, chosen = 1e9, _NONE
    for card in range(52):
        if hand >> card & 1 and card != kept:
            left = hand & ~(1 << card)
            cost = NOW * deadwood(left) + _after_draw(left, unseen) + SAFETY * _use_to_others(card, unseen)
            cost -= 0.001 * _VALUES[card]
            if cost < best:
                best, chosen = cost, card
    return chosen


@numba.njit
def _takes(hand, upcard, unseen):  # type: ignore[no-untyped-def]
    return _after_discard(hand | (1 << upcard), upcard) <= _after_draw(hand, unseen)


@dataclass(frozen=True)
class Seen:
    """The content of an observation, cards as bits."""

    phase: str
    hand: int
    upcard: int
    previous_upcard: int
    #: Neither in the hand nor ever shown: in the stock or with the opponent.
    unseen: int
    #: Some discard leaves no more than the knock card. The engine also allows to knock with melds alone, one
    #: card too many, and then offers no discard.
    may_knock: bool


def seen(state: pyspiel.State) -> Seen:
    player = state.current_player()
    text = state.observation_string(player)
    own = text[text.index(f"Player{player}:") :]
    hand = _cards("".join(own.split("+")[2].split("|")))
    previous, upcard, pile = (
        _cards(_after(text, name)) for name in ("Prev upcard: ", "Upcard: ", "Discard pile: ")
    )
    laid = _cards("".join(re.findall(r"(?:Layed melds|Layoffs):(.*)", text)))
    known = hand | previous | upcard | pile | laid
    # A knock at the wall takes the upcard.
    least = int(_after_discard(hand | upcard, _NONE))
    may_knock = least <= int(_after(text, "Knock card: "))
    unseen = ((1 << 52) - 1) & ~known
    return Seen(_after(text, "Phase: "), hand, _only(upcard), _only(previous), unseen, may_knock)


def _after(text: str, name: str) -> str:
    begin = text.index(name) + len(name)
    end = text.find("\n", begin)
    return text[begin : end if end >= 0 else len(text)]


def _cards(text: str) -> int:
    cards = 0
    for rank, suit in re.findall(r"([A2-9TJQK])([scdh])", text):
        cards |= 1 << (_RANKS.index(rank) + 13 * _SUITS.index(suit))
    return cards


def _only(cards: int) -> int:
    return cards.bit_length() - 1


class GinRummyPlayer(Player):
    def __init__(self) -> None:
        self._melds: dict[int, int] = {}
        # Compile all: the first choice of a game needs only a part.
        _discard(0b11, 0b100, _NONE)
        _takes(0b1, 1, 0b100)

    def choose(self, state: pyspiel.State) -> int:
        legal: list[int] = state.legal_actions()
        if len(legal) == 1:
            return legal[0]
        known = seen(state)
        if KNOCK in legal and known.may_knock:
            return KNOCK
        if known.phase == "Wall":
            return PASS
        if known.phase in ("FirstUpcard", "Draw"):
            other = PASS if PASS in legal else STOCK
            return UPCARD if _takes(known.hand, known.upcard, known.unseen) else other
        if known.phase == "Discard":
            return int(_discard(known.hand, known.unseen, known.previous_upcard))
        return self._least_left(state, legal, known.hand)

    def _least_left(self, state: pyspiel.State, legal: list[int], hand: int) -> int:
        """In a knock or layoff: the card or meld to part with that leaves the least deadwood, or a pass.

        A meld must be laid to count; a card need only go where that leaves less than keeping it.
        """
        parted = {action: self._parted(state, action) for action in legal if action != PASS}
        left = {action: int(deadwood(hand & ~cards)) for action, cards in parted.items()}
        best = min(left, key=lambda action: (left[action], -action))
        if PASS in legal and best < UPCARD and left[best] >= deadwood(hand):
            return PASS
        if PASS in legal and best >= MELDS and left[best] > deadwood(hand):
            return PASS
        return best

    def _parted(self, state: pyspiel.State, action: int) -> int:
        if action < UPCARD:
            return 1 << action
        if action not in self._melds:
            self._melds[action] = _cards(state.action_to_string(0, action).rpartition(" ")[2])
        return self._melds[action]


GAME = BoardGame(
    name="gin_rummy",
    tasks=(300_000_000, 399_999_999),
    rules=rules_beside(__file__),
    advice="draw cards that complete a meld, discard high unmatched ones, knock as soon as it is legal",
    player=GinRummyPlayer,
    variants=tuple({"hand_size": hand, "knock_card": knock} for hand in (7, 8, 9) for knock in (10, 9, 8)),
)
