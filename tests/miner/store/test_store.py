from __future__ import annotations

import pytest

from miner.api.status import StoreCounts
from miner.chain.nonces import insert_nonce
from miner.store.jobs import record_start
from miner.store.store import Store
from tests.miner.store.rows import start_request
from tests.miner.store.test_offers import NO, YES, record


async def test_the_summary_counts(store: Store) -> None:
    await record(store, YES)
    await record(store, NO, task_id="t2")
    await store.write(record_start, "v1", start_request("t1"), 1.0)
    assert await store.summary() == StoreCounts(jobs={"queued": 1}, offers={"accepted": 1, "refused": 1})


async def test_a_reader_cannot_write(store: Store) -> None:
    with pytest.raises(Exception, match="readonly"):
        await store.read(insert_nonce, b"k" * 32, "1_a", 100.0)
