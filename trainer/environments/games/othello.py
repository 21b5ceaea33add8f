"""Othello: alpha-beta over bitboards, exact when few squares are empty.

Against the evaluator's search, depth 4 already wins all games; deeper labels would be harder to learn.
"""

from __future__ import annotations

import numba
import numpy as np
import pyspiel

from trainer.environments.games import OPENING_PLIES, BoardGame, Player, coloured, rules_beside

PASS = 64
#: With so many empty squares or fewer, every position is searched to the end.
EXACT = 11
DEPTH = 4

_ONE = np.uint64(1)
_ZERO = np.uint64(0)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
#: Directions as shifts; the mask keeps a shift from running over the board's edge. Bit i is row i // 8.
_SHIFTS = np.array([1, 7, 8, 9], dtype=np.uint64)
_NOT_A, _NOT_H = np.uint64(0xFEFEFEFEFEFEFEFE), np.uint64(0x7F7F7F7F7F7F7F7F)
#: After a shift up by 1, 7, 8, 9 and after a shift down by the same.
_UP_MASKS = np.array([_NOT_A, _NOT_H, _ALL, _NOT_A], dtype=np.uint64)
_DOWN_MASKS = np.array([_NOT_H, _NOT_A, _ALL, _NOT_H], dtype=np.uint64)
_CORNERS = np.uint64(0x8100000000000081)
#: For each corner: itself, the diagonal neighbour (X) and the two beside it (C).
_CORNER = np.array([0, 7, 56, 63], dtype=np.int64)
_X_SQUARE = np.array([9, 14, 49, 54], dtype=np.int64)
_C_SQUARES = np.array([[1, 8], [6, 15], [48, 57], [55, 62]], dtype=np.int64)
_WIN = 10_000


@numba.njit
def _count(bits):  # type: ignore[no-untyped-def]
    n = 0
    while bits != _ZERO:
        bits &= bits - _ONE
        n += 1
    return n


@numba.njit
def _moves(own, other):  # type: ignore[no-untyped-def]
    empty = ~(own | other)
    found = _ZERO
    for k in range(4):
        shift = _SHIFTS[k]
        mask = _UP_MASKS[k]
        run = (own << shift) & mask & other
        for _ in range(5):
            run |= (run << shift) & mask & other
        found |= (run << shift) & mask & empty
        mask = _DOWN_MASKS[k]
        run = (own >> shift) & mask & other
        for _ in range(5):
            run |= (run >> shift) & mask & other
        found |= (run >> shift) & mask & empty
    return found


@numba.njit
def _flips(own, other, move):  # type: ignore[no-untyped-def]
    """The opponent's discs that a move, one bit, turns."""
    turned = _ZERO
    for k in range(4):
        shift = _SHIFTS[k]
        mask = _UP_MASKS[k]
        run = _ZERO
        at = (move << shift) & mask
        while at & other != _ZERO:
            run |= at
            at = (at << shift) & mask
        if at & own != _ZERO:
            turned |= run
        mask = _DOWN_MASKS[k]
        run = _ZERO
        at = (move >> shift) & mask
        while at & other != _ZERO:
            run |= at
            at = (at >> shift) & mask
        if at & own != _ZERO:
            turned |= run
    return turned


@numba.njit
def _near(bits):  # type: ignore[no-untyped-def]
    """All squares beside these."""
    found = _ZERO
    for k in range(4):
        found |= (bits << _SHIFTS[k]) & _UP_MASKS[k]
        found |= (bits >> _SHIFTS[k]) & _DOWN_MASKS[k]
    return found


@numba.njit
def _value(own, other):  # type: ignore[no-untyped-def]
    """Corners and the squares beside empty ones, moves, and discs that border on empty squares."""
    value = 8 * (_count(_moves(own, other)) - _count(_moves(other, own)))
    beside = _near(~(own | other))
    value -= 3 * (_count(own & beside) - _count(other & beside))
    for k in range(4):
        corner = _ONE << np.uint64(_CORNER[k])
        x = _ONE << np.uint64(_X_SQUARE[k])
        if own & corner != _ZERO:
            sign = 1
        elif other & corner != _ZERO:
            sign = -1
        else:
            if own & x != _ZERO:
                value -= 40
            elif other & x != _ZERO:
                value += 40
            for j in range(2):
                c = _ONE << np.uint64(_C_SQUARES[k, j])
                if own & c != _ZERO:
                    value -= 12
                elif other & c != _ZERO:
                    value += 12
            continue
        value += 100 * sign
        for j in range(2):  # discs along the edge from an own corner cannot be turned
            c = _ONE << np.uint64(_C_SQUARES[k, j])
            if sign > 0 and own & c != _ZERO:
                value += 15
            elif sign < 0 and other & c != _ZERO:
                value -= 15
    return value


@numba.njit
def _final(own, other):  # type: ignore[no-untyped-def]
    difference = _count(own) - _count(other)
    if difference > 0:
        return _WIN + difference
    return -_WIN + difference if difference < 0 else 0


@numba.njit
def _search(own, other, depth, alpha, beta, passed):  # type: ignore[no-untyped-def]
    """Negamax; at depth below zero only the end of the game stops it."""
    if depth == 0:
        return _value(own, other)
    moves = _moves(own, other)
    if moves == _ZERO:
        if passed:
            return _final(own, other)
        return -_search(other, own, depth, -beta, -alpha, True)
    best = -2 * _WIN
    for wave in range(2):  # corners first
        rest = moves & _CORNERS if wave == 0 else moves & ~_CORNERS
        while rest != _ZERO:
            move = rest & (~rest + _ONE)
            rest ^= move
            turned = _flips(own, other, move)
            value = -_search(other ^ turned, own | turned | move, depth - 1, -beta, -max(alpha, best), False)
            if value > best:
                best = value
                if best >= beta:
                    return best
    return best


@numba.njit
def _best(own, other):  # type: ignore[no-untyped-def]
    """The square of the best move, the first of equals."""
    empty = 64 - _count(own | other)
    depth = -1 if empty <= EXACT else DEPTH
    moves = _moves(own, other)
    best, at = -2 * _WIN, -1
    for square in range(64):
        move = _ONE << np.uint64(square)
        if moves & move == _ZERO:
            continue
        turned = _flips(own, other, move)
        value = -_search(other ^ turned, own | turned | move, depth - 1, -2 * _WIN, -best, False)
        if value > best:
            best, at = value, square
    return at


class OthelloPlayer(Player):
    def choose(self, state: pyspiel.State) -> int:
        legal = state.legal_actions()
        if len(legal) == 1:
            return int(legal[0])
        own, other = discs(state)
        return int(_best(np.uint64(own), np.uint64(other)))


def discs(state: pyspiel.State) -> tuple[int, int]:
    """Return the discs of the player to move and of the other, bit by bit as the actions count."""
    lines = state.observation_string(state.current_player()).splitlines()[2:10]
    cells = "".join(line[2:18:2] for line in lines)
    squares = list(enumerate(cells))
    black, white = (sum(1 << square for square, cell in squares if cell == colour) for colour in "xo")
    return (black, white) if state.current_player() == 0 else (white, black)


GAME = BoardGame(
    name="othello",
    tasks=(400_000_000, 499_999_999),
    rules=rules_beside(__file__),
    advice="take corners, keep off the squares beside them, keep many moves open",
    player=OthelloPlayer,
    observe=coloured("x (Black)", "o (White)"),
    opening_plies=OPENING_PLIES,
)
