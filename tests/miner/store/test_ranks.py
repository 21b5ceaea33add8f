"""The miner's place over time."""

from __future__ import annotations

from miner.store.ranks import (
    newest_rank,
    ranks_between,
    record_rank,
    record_sent_report,
    report_was_sent,
)
from miner.store.store import Store
from tests.miner.history import HOUR, NOW, rank_row


async def test_a_place_is_kept_once_per_change_and_once_an_hour(store: Store) -> None:
    seen = [
        rank_row(NOW, 20),
        rank_row(NOW + 300, 20, emission=0.6),
        rank_row(NOW + 600, 19),
        rank_row(NOW + 900, 19).model_copy(update={"uid": 8}),
        rank_row(NOW + 900 + HOUR, 19, emission=0.7),
    ]
    added = [await store.write(record_rank, row) for row in seen]
    assert added == [True, False, True, True, True]
    assert await store.read(ranks_between, NOW, NOW + 900) == [seen[0], seen[2]]
    assert await store.read(newest_rank) == seen[4]
    assert await store.read(newest_rank, NOW + 500) == seen[0]
    assert await store.read(newest_rank, NOW - 1) is None


async def test_the_same_metagraph_read_from_the_cache_again_adds_nothing(store: Store) -> None:
    assert await store.write(record_rank, rank_row(NOW, 20))
    assert not await store.write(record_rank, rank_row(NOW, 20))


async def test_rows_of_a_clock_that_was_ahead_do_not_keep_later_ones_away(store: Store) -> None:
    assert await store.write(record_rank, rank_row(NOW + 400 * HOUR, 20))
    assert await store.write(record_rank, rank_row(NOW, 19))
    assert not await store.write(record_rank, rank_row(NOW + 60, 19))
    assert await store.read(newest_rank, NOW + 60) == rank_row(NOW, 19)


async def test_a_report_counts_as_sent_once(store: Store) -> None:
    assert not await store.read(report_was_sent, "daily", NOW)
    await store.write(record_sent_report, "daily", NOW, NOW + 1)
    await store.write(record_sent_report, "daily", NOW, NOW + 2)
    assert await store.read(report_was_sent, "daily", NOW)
    assert not await store.read(report_was_sent, "weekly", NOW)
