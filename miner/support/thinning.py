"""Draw long series with few points, without losing their peaks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

Column = Sequence[float | None]


def kept_points(x: Sequence[float], columns: Sequence[Column], most: int) -> list[int]:
    """The indices of at most `most` points: the first, the last, and of every equal range of `x`, which
    rises, those with the lowest and the highest value of each column."""
    count = len(x)
    if count <= most:
        return list(range(count))
    ranges = max((most - 2) // (2 * max(len(columns), 1)), 1)
    kept = {0, count - 1}
    width, start = (x[-1] - x[0]) / ranges, 0
    for number in range(1, ranges + 1):
        end = count if number == ranges else bisect_left(x, x[0] + number * width, start)
        if end > start:
            for column in columns:
                kept.update(_peaks(column, start, end))
        start = end
    return sorted(kept)


def _peaks(column: Column, start: int, end: int) -> tuple[int, ...]:
    part = column[start:end]
    known = [value for value in part if value is not None]
    if not known:
        return (start,)
    return start + part.index(min(known)), start + part.index(max(known))
