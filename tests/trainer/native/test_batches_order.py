"""Which rows are trained in which step, on which rank, and how they are packed."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.native.batches import SampleOrder, pack_rows

pytestmark = pytest.mark.small


def order(
    lengths: list[int],
    *,
    world: int = 1,
    micro: int = 2,
    accumulation: int = 1,
    packing: bool = False,
    grouped: bool = False,
) -> SampleOrder:
    return SampleOrder(
        np.asarray(lengths, dtype=np.int64),
        32,
        micro,
        accumulation,
        world,
        packing=packing,
        group_by_length=grouped,
    )


def rows_of(step: list) -> list[int]:
    return sorted(row for rank in step for micro in rank for sequence in micro for row in sequence)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=60).filter(lambda sizes: min(sizes) <= 32),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
def test_every_rank_gets_the_same_number_of_full_batches_and_a_run_resumes_where_it_stopped(
    lengths: list[int], world: int, micro: int, accumulation: int, packing: bool, grouped: bool
) -> None:
    sample_order = order(
        lengths, world=world, micro=micro, accumulation=accumulation, packing=packing, grouped=grouped
    )
    steps = list(islice(sample_order.steps(), 7))
    for step in steps:
        assert [len(rank) for rank in step] == [accumulation] * world
        assert all(len(batch) == micro for rank in step for batch in rank)
    assert list(islice(sample_order.steps(3), 4)) == steps[3:]
    assert list(islice(sample_order.for_rank(world - 1, 2), 2)) == [step[world - 1] for step in steps[2:4]]


def test_an_epoch_has_each_row_at_most_once_and_the_next_one_another_order() -> None:
    sample_order = order(list(range(1, 33)), micro=4)
    steps = list(islice(sample_order.steps(), 2 * sample_order.steps_per_epoch))
    first, second = steps[: sample_order.steps_per_epoch], steps[sample_order.steps_per_epoch :]
    assert sorted(row for step in first for row in rows_of(step)) == list(range(32))
    assert first != second


def test_the_rows_of_a_step_do_not_depend_on_how_many_share_it() -> None:
    lengths = [1 + index % 30 for index in range(64)]
    alone = order(lengths, micro=4, accumulation=2, world=1)
    shared = order(lengths, micro=4, accumulation=1, world=2)
    for one, two in zip(islice(alone.steps(), 12), islice(shared.steps(), 12), strict=True):
        assert rows_of(one) == rows_of(two)


def test_neighbours_are_of_like_length_when_grouped() -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 33, size=512).tolist()

    def spread(sample_order: SampleOrder) -> float:
        spans = []
        for step in islice(sample_order.steps(), sample_order.steps_per_epoch):
            sizes = [lengths[row] for row in rows_of(step)]
            spans.append(max(sizes) - min(sizes))
        return sum(spans) / len(spans)

    assert spread(order(lengths, micro=8, grouped=True)) < spread(order(lengths, micro=8)) / 3


def test_rows_that_are_too_long_are_left_out_and_none_left_is_an_error() -> None:
    sample_order = order([40, 3, 50, 4])
    assert {row for step in islice(sample_order.steps(), 3) for row in rows_of(step)} == {1, 3}
    with pytest.raises(ValueError, match="no row"):
        next(order([40]).steps())


def test_a_growing_batch_reaches_its_size_uses_every_row_once_and_resumes_where_it_stopped() -> None:
    sample_order = SampleOrder(np.full(200, 8), 32, 2, 4, 2, ramp=6)
    steps = list(islice(sample_order.steps(), 20))
    sizes = [len(rows_of(step)) for step in steps]
    assert sizes[0] == 4
    assert sizes[:7] == sorted(sizes[:7])
    assert set(sizes[6:]) == {16}
    assert all(len(step[0]) == len(step[1]) for step in steps)
    seen = [row for step in steps[:13] for row in rows_of(step)]
    assert len(seen) == len(set(seen))
    assert list(islice(sample_order.steps(9), 11)) == steps[9:]


def test_one_micro_batch_grows_by_its_rows() -> None:
    sample_order = SampleOrder(np.full(64, 8), 32, 8, 1, 1, ramp=4)
    assert [len(rows_of(step)) for step in islice(sample_order.steps(), 6)] == [2, 3, 5, 6, 8, 8]


@given(st.lists(st.integers(0, 70), max_size=200), st.integers(1, 64))
def test_every_row_that_fits_is_in_exactly_one_window_and_no_window_overflows(
    lengths: list[int], capacity: int
) -> None:
    windows = pack_rows(lengths, capacity)
    packed = sorted(index for window in windows for index in window)
    assert packed == [index for index, length in enumerate(lengths) if 1 <= length <= capacity]
    assert all(sum(lengths[index] for index in window) <= capacity for window in windows)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=200))
def test_no_two_windows_could_have_been_one(lengths: list[int]) -> None:
    """Best fit opens a window only when the row fits in none: at most one is half empty."""
    windows = pack_rows(lengths, 64)
    sums = sorted(sum(lengths[index] for index in window) for window in windows)
    assert sum(total <= 32 for total in sums) <= 1


def test_a_mixed_set_fills_its_windows_almost_wholly() -> None:
    random = np.random.default_rng(1)
    lengths = random.integers(20, 400, size=5000)
    windows = pack_rows(lengths, 2048)
    assert lengths.sum() > 0.99 * 2048 * len(windows)


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        pack_rows([1], 0)


def test_rows_of_a_step_pass_with_others_of_like_length() -> None:
    """The same rows in each step, in passes that hold little padding; every rank gets as much."""
    lengths = np.random.default_rng(4).integers(1, 33, 96).tolist()
    together, whole = order(lengths, world=2, micro=4, accumulation=3), order(lengths, micro=24)
    for step, rows in zip(islice(together.steps(), 8), whole.steps(), strict=False):
        assert rows_of(step) == rows_of(rows)
        widths = [[max(lengths[row] for (row,) in micro) for micro in rank] for rank in step]
        assert all(rank == sorted(rank, reverse=True) for rank in widths)
        assert widths[0][0] >= widths[1][0]
        assert widths[0][1] <= widths[1][1]
