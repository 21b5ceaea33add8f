"""A thinned series has few points and the same peaks."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from miner.jobs.figures import kept_points


def test_a_short_series_stays_whole() -> None:
    assert kept_points([1, 2, 3], [[5.0, None, 7.0]], 3) == [0, 1, 2]
    assert kept_points([], [[]], 10) == []


def test_a_peak_of_one_step_in_a_hundred_thousand_stays_in_both_directions() -> None:
    count = 100_000
    loss: list[float | None] = [2.0 + math.sin(step / 50) for step in range(count)]
    speed: list[float | None] = [1000.0] * count
    loss[43_210], loss[77_777], speed[5_001] = 9.0, -3.0, 1.0
    kept = kept_points(range(count), [loss, speed], 500)
    assert len(kept) <= 500
    assert {0, count - 1, 43_210, 77_777, 5_001} <= set(kept)
    # Spread over the whole: no hole is longer than two ranges.
    ranges = (500 - 2) // 4
    assert max(later - before for before, later in pairwise(kept)) <= 2 * count / ranges


@given(
    st.lists(st.tuples(st.integers(1, 50), st.none() | st.floats(-1e6, 1e6)), max_size=300),
    st.integers(4, 60),
)
def test_whatever_the_series_the_ends_and_the_extremes_stay(
    points: list[tuple[int, float | None]], most: int
) -> None:
    x, at = [], 0
    for step, _ in points:
        at += step
        x.append(at)
    column = [value for _, value in points]
    kept = kept_points(x, [column], most)
    assert len(kept) <= max(most, 0)
    assert kept == sorted(set(kept))
    if points:
        assert (kept[0], kept[-1]) == (0, len(points) - 1)
    known = [value for value in column if value is not None]
    if known:
        assert {min(known), max(known)} <= {column[index] for index in kept}


def test_points_that_are_all_at_one_place_are_thinned_too() -> None:
    assert len(kept_points([7.0] * 1000, [list(range(1000))], 100)) <= 100
