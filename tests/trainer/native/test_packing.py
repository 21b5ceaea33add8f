"""Rows into windows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.native.packing import fill_rate, pack


@given(st.lists(st.integers(0, 70), max_size=200), st.integers(1, 64))
def test_every_row_that_fits_is_in_exactly_one_window_and_no_window_overflows(
    lengths: list[int], capacity: int
) -> None:
    windows = pack(lengths, capacity)
    packed = sorted(index for window in windows for index in window)
    assert packed == [index for index, length in enumerate(lengths) if 1 <= length <= capacity]
    assert all(sum(lengths[index] for index in window) <= capacity for window in windows)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=200))
def test_no_two_windows_could_have_been_one(lengths: list[int]) -> None:
    """Best fit opens a window only when the row fits in none: at most one is half empty."""
    windows = pack(lengths, 64)
    sums = sorted(sum(lengths[index] for index in window) for window in windows)
    assert sum(total <= 32 for total in sums) <= 1


def test_a_mixed_set_fills_its_windows_almost_wholly() -> None:
    random = np.random.default_rng(1)
    lengths = random.integers(20, 400, size=5000)
    windows = pack(lengths, 2048)
    assert fill_rate(lengths, windows, 2048) > 0.99


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        pack([1], 0)
