"""Rows of a step that are of like length pass together; each step has the same rows as without that."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from trainer.session.step_order import StepOrder, passes_by_length

LENGTHS: NDArray[np.int64] = np.random.default_rng(7).lognormal(5, 0.8, 1000).astype(np.int64) + 1


def padded(rows: NDArray[np.int64], micro: int) -> int:
    """Tokens of these rows, each as long as the longest of its micro-batch."""
    return int((LENGTHS[rows].reshape(-1, micro).max(axis=1) * micro).sum())


def order(epoch: int = 0) -> StepOrder:
    return StepOrder(LENGTHS, micro=4, passes=4, ranks=2, seed=3, epoch=lambda: epoch)


def test_an_epoch_has_each_row_once_and_a_step_random_ones() -> None:
    rows = np.array(list(order()))
    assert sorted(rows.tolist()) == list(range(1000))
    means = LENGTHS[rows[:992]].reshape(-1, 32).mean(axis=1)
    shuffled = np.random.default_rng(1).permutation(LENGTHS)[:992].reshape(-1, 32).mean(axis=1)
    assert np.std(means) == pytest.approx(np.std(shuffled), rel=0.5), "not sorted from step to step"


def test_little_is_padded() -> None:
    rows = np.array(list(order()))[:992]
    random = np.random.default_rng(2).permutation(1000)[:992]
    real = int(LENGTHS[rows].sum())
    assert padded(rows, 4) < 1.3 * real < 1.6 * real < padded(random, 4)


def test_the_order_follows_from_seed_and_epoch() -> None:
    first = order()
    assert list(first) == list(first) == list(order())
    assert list(first) != list(order(epoch=1)) == list(order(epoch=1))


def test_the_rows_after_the_last_whole_step_stay_behind() -> None:
    """A loader cuts micro-batches from the start: a short one in between would move all that follow."""
    rows = list(order())
    assert len(rows) == len(order()) == 1000
    assert sorted(rows[992:]) == sorted(set(range(1000)) - set(rows[:992]))


def test_the_longest_pass_first_and_no_rank_has_the_longest_rows_each_time() -> None:
    rows = np.arange(32)
    passes = passes_by_length(rows, LENGTHS, 4, 2)
    assert [each.shape for each in passes] == [(2, 4)] * 4
    longest = [int(LENGTHS[each].max()) for each in passes]
    assert longest == sorted(longest, reverse=True)
    ahead = [int(LENGTHS[each[0]].max()) >= int(LENGTHS[each[1]].max()) for each in passes]
    assert ahead == [True, False, True, False]
