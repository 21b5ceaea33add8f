from __future__ import annotations

import asyncio

import pytest

from miner.chain.nonces import NonceUsed, drop_nonces, insert_nonce, live_nonces
from miner.store.jobs import record_start
from miner.store.store import Store
from tests.miner.store.rows import column, start_request
from tests.miner.store.test_offers import NO, YES, record


async def test_a_nonce_can_be_used_once_also_at_the_same_moment(store: Store) -> None:
    uses = [store.write(insert_nonce, b"k" * 32, "1_a", 100.0) for _ in range(10)]
    results = await asyncio.gather(*uses, return_exceptions=True)
    assert [type(result) for result in results].count(NonceUsed) == 9
    await store.write(insert_nonce, b"j" * 32, "1_a", 100.0)  # another signer's nonce is another nonce


async def test_expired_nonces_are_dropped_and_live_ones_are_read(store: Store) -> None:
    await store.write(insert_nonce, b"k" * 32, "old", 100.0)
    await store.write(insert_nonce, b"k" * 32, "new", 300.0)
    assert await store.read(live_nonces, 200.0) == [(b"k" * 32, "new", 300.0)]
    assert await store.write(drop_nonces, 200.0) == 1
    assert column(store, "SELECT nonce FROM nonces") == ["new"]


async def test_the_summary_counts(store: Store) -> None:
    await record(store, YES)
    await record(store, NO, task_id="t2")
    await store.write(record_start, "v1", start_request("t1"), 1.0)
    assert await store.summary() == {"jobs": {"queued": 1}, "offers": {"accepted": 1, "refused": 1}}


async def test_a_reader_cannot_write(store: Store) -> None:
    with pytest.raises(Exception, match="readonly"):
        await store.read(insert_nonce, b"k" * 32, "1_a", 100.0)
