"""Metrics of the store: over a window, with a detail for people."""

from __future__ import annotations

import sqlite3

from miner.alerts.metrics import METRICS
from miner.observe.alerts import MINER
from miner.store.database import insert_row
from miner.store.ranks import record_rank
from miner.store.store import Store
from tests.miner.history import DAY, HOUR, NOW, add_job, rank_row


def fill(connection: sqlite3.Connection) -> None:
    for number, (state, reason) in enumerate(
        [("done", "published"), ("failed", "oom"), ("failed", "oom"), ("cancelled", "cancelled")]
    ):
        add_job(connection, f"t{number}", NOW - HOUR, state=state, reason=reason)
    add_job(connection, "before", NOW - 3 * DAY, state="failed", reason="network")
    for days, rank in ((9, 60), (3, 40), (1, 55)):
        record_rank(connection, rank_row(NOW - days * DAY, rank))
    for outcome, hours in (("network", 1), ("rate_limited", 2), ("ok", 3), ("network", 60)):
        step = {"name": "publish", "began_at": NOW - hours * HOUR, "outcome": outcome, "detail": outcome}
        insert_row(connection, "steps", job_id=1, **step)


async def test_metrics_of_the_store_are_read_over_their_window(store: Store) -> None:
    await store.write(fill)
    found = {}
    for name in ("jobs.failed", "rank.place", "hub.failures"):
        query = METRICS[name].query
        assert query is not None
        series = (await store.read(query, NOW - 2 * DAY, NOW))[MINER]
        found[name] = ([point.value for point in series.points], series.count, series.detail)
    assert found == {
        "jobs.failed": ([2 / 3], 3, "2 of 3 jobs: oom 2"),
        "rank.place": ([40, 55], None, "from 40 to 55 of 200"),
        "hub.failures": ([2.0], None, "rate_limited"),
    }
