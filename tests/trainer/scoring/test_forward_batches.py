"""Rows in batches of alike length."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.scoring.forward import batch_tokens, length_batches, rank_share

LENGTHS = st.lists(st.integers(1, 400), max_size=60)


@given(LENGTHS, st.integers(1, 1000))
def test_every_row_is_in_one_batch_and_no_batch_is_too_large(lengths: list[int], most: int) -> None:
    batches = length_batches(lengths, most)
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[place] for place in batch) <= most


@given(LENGTHS, st.integers(1, 1000), st.integers(1, 9))
def test_ranks_make_equally_many_passes_and_count_each_row_once(
    lengths: list[int], most: int, world: int
) -> None:
    shares = [rank_share(lengths, most, rank, world) for rank in range(world)]
    assert len({len(one) for one in shares}) == 1
    for rank, one in enumerate(shares):
        counted = [place for batch, counts in one if counts for place in batch]
        assert sorted(counted) == list(range(rank, len(lengths), world))


def test_a_large_vocabulary_makes_small_passes() -> None:
    assert batch_tokens(150_000) < batch_tokens(30_000) <= 16_384
    assert batch_tokens(10**12) == 1
