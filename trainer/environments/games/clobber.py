"""Clobber: negamax by iterative deepening over bitboards, exact as soon as the end is in reach.

Every adjacent pair of opponents is a move for both, so moves alone tell nothing; what counts before the end
is on how many pieces each side can still move. The search is bounded by positions, not by time, and begins
with an empty table: the same position has the same label on every machine.
"""

from __future__ import annotations

import numba
import numpy as np
import pyspiel

from trainer.environments.games import OPENING_PLIES, BoardGame, Player, coloured, rules_beside

#: No new depth is begun after so many positions; the last one may take some times as many.
POSITIONS = 150_000
_TABLE = 1 << 18
_WIN = 1_000
_MOST_MOVES, _MOST_PLIES = 120, 32
_EXACT, _LOWER, _UPPER = 0, 1, 2
#: Up, right, down, left, as the actions count.
_DIRECTIONS = 4
_VALUE, _DEPTH, _BOUND, _MOVE, _SEARCH = range(5)


@numba.njit
def _count(bits):  # type: ignore[no-untyped-def]
    bits -= (bits >> 1) & 0x55555555
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) & 0xFFFFFFFF) >> 24


@numba.njit
def _shifted(bits, direction, columns, masks):  # type: ignore[no-untyped-def]
    """These squares one step on; masks keep a step from leaving the board."""
    if direction == 0:
        return bits >> columns
    if direction == 1:
        return (bits & masks[1]) << 1
    if direction == 2:
        return (bits << columns) & masks[2]
    return (bits & masks[0]) >> 1


@numba.njit
def _beside(bits, columns, masks):  # type: ignore[no-untyped-def]
    across = ((bits & masks[1]) << 1) | ((bits & masks[0]) >> 1)
    return across | (bits >> columns) | ((bits << columns) & masks[2])


@numba.njit
def _value(own, other, columns, masks):  # type: ignore[no-untyped-def]
    return _count(own & _beside(other, columns, masks)) - _count(other & _beside(own, columns, masks))


@numba.njit
def _search(own, other, depth, alpha, beta, ply, columns, masks, table):  # type: ignore[no-untyped-def]
    """Negamax from a position whose pieces without any opponent in reach count for nothing."""
    keys, entries, moves, scores, counter = table
    counter[0] += 1
    live = own & _beside(other, columns, masks)
    if live == 0:
        return -_WIN
    if depth == 0:
        return _value(own, other, columns, masks)
    live |= other & _beside(own, columns, masks)
    while True:
        more = live | (_beside(live, columns, masks) & (own | other))
        if more == live:
            break
        live = more
    own &= live
    other &= live
    key = own | (other << 31)
    slot = ((key ^ (key >> 29)) * 0x9E3779B97F4A7C1 >> 20) & (_TABLE - 1)
    first = -1
    if keys[slot] == key and entries[slot, _SEARCH] == counter[1]:
        value, bound = entries[slot, _VALUE], entries[slot, _BOUND]
        if (entries[slot, _DEPTH] >= depth or abs(value) == _WIN) and (
            bound == _EXACT or (bound == _LOWER and value >= beta) or (bound == _UPPER and value <= alpha)
        ):
            return value
        first = entries[slot, _MOVE]
    count = 0
    for direction in range(_DIRECTIONS):
        targets = _shifted(own, direction, columns, masks) & other
        while targets != 0:
            target = targets & -targets
            targets ^= target
            move = target * 4 + direction
            moves[ply, count] = move
            if move == first:
                scores[ply, count] = _WIN
            elif depth > 1:
                source = _shifted(target, direction ^ 2, columns, masks)
                scores[ply, count] = -_value(other ^ target, own ^ source ^ target, columns, masks)
            else:
                scores[ply, count] = 0
            count += 1
    best, best_move, low = -_WIN - 1, -1, alpha
    for index in range(count):
        at = index
        for later in range(index + 1, count):
            if scores[ply, later] > scores[ply, at]:
                at = later
        move = moves[ply, at]
        moves[ply, at], scores[ply, at] = moves[ply, index], scores[ply, index]
        target, direction = move >> 2, move & 3
        source = _shifted(target, direction ^ 2, columns, masks)
        value = -_search(
            other ^ target, own ^ source ^ target, depth - 1, -beta, -low, ply + 1, columns, masks, table
        )
        if value > best:
            best, best_move = value, move
            low = max(low, value)
            if low >= beta or best == _WIN:
                break
    keys[slot] = key
    entries[slot, _VALUE], entries[slot, _DEPTH], entries[slot, _MOVE] = best, depth, best_move
    entries[slot, _BOUND] = _LOWER if best >= beta else (_UPPER if best <= alpha else _EXACT)
    entries[slot, _SEARCH] = counter[1]
    return best


@numba.njit
def _best(own, other, columns, masks, actions, limit, table):  # type: ignore[no-untyped-def]
    """The best of these actions, the first of equals; in a lost position the one that looked best last."""
    counter = table[4]
    counter[0] = 0
    counter[1] += 1
    order = actions.copy()
    chosen = order[0]
    for depth in range(1, _MOST_PLIES):
        best, at = -_WIN - 1, 0
        for index in range(len(order)):
            direction = order[index] & 3
            source = 1 << (order[index] >> 2)
            target = _shifted(source, direction, columns, masks)
            value = -_search(
                other ^ target, own ^ source ^ target, depth - 1, -_WIN, -best, 0, columns, masks, table
            )
            if value > best:
                best, at = value, index
                if best == _WIN:
                    break
        if best == -_WIN:
            break
        chosen = order[at]
        if best == _WIN or counter[0] > limit:
            break
        for index in range(at, 0, -1):
            order[index] = order[index - 1]
        order[0] = chosen
    return chosen


class ClobberPlayer(Player):
    def __init__(self) -> None:
        keys = np.zeros(_TABLE, dtype=np.int64)
        entries = np.zeros((_TABLE, 5), dtype=np.int64)
        moves, scores = (np.zeros((_MOST_PLIES, _MOST_MOVES), dtype=np.int64) for _ in range(2))
        #: Shared by all searches; an entry counts for the search that wrote it.
        self._table = (keys, entries, moves, scores, np.zeros(2, dtype=np.int64))

    def choose(self, state: pyspiel.State) -> int:
        legal = state.legal_actions()
        if len(legal) == 1:
            return int(legal[0])
        own, other, rows, columns = pieces(state)
        actions = np.array(legal, dtype=np.int64)
        return int(_best(own, other, columns, _masks(rows, columns), actions, POSITIONS, self._table))


def pieces(state: pyspiel.State) -> tuple[int, int, int, int]:
    """Return the pieces of the player to move and of the other bit by bit, rows and columns."""
    player = state.current_player()
    lines = state.observation_string(player).splitlines()
    rows = [line.lstrip("0123456789") for line in lines[:-1] if line.strip()]
    cells = list(enumerate("".join(rows)))
    white, black = (sum(1 << square for square, cell in cells if cell == colour) for colour in "ox")
    own, other = (white, black) if player == 0 else (black, white)
    return own, other, len(rows), len(rows[0])


def _masks(rows: int, columns: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Squares not in the first column, not in the last, and all of them."""
    squares = range(rows * columns)
    return np.array(
        [
            sum(1 << square for square in squares if square % columns != 0),
            sum(1 << square for square in squares if square % columns != columns - 1),
            sum(1 << square for square in squares),
        ],
        dtype=np.int64,
    )


GAME = BoardGame(
    name="clobber",
    tasks=(700_000_000, 799_999_999),
    rules=rules_beside(__file__),
    advice="keep own moves and take the opponent's, finish isolated groups last",
    player=ClobberPlayer,
    observe=coloured("o (White)", "x (Black)"),
    variants=tuple({"rows": rows, "columns": columns} for rows, columns in ((4, 5), (5, 5), (5, 6))),
    opening_plies=OPENING_PLIES,
)
