"""Minutes and hours of GPUs in the store."""

from __future__ import annotations

import time

import pytest

from core.domain.keys import TaskKey
from miner.api.samples import GpuRollup
from miner.store.jobs import record_start
from miner.store.samples import HOUR, MINUTE, add_minutes, job_ids, prune_rollups, rollups
from miner.store.store import Store
from tests.miner.store.rows import start_request

NOW = 1_700_000_000 // HOUR * HOUR
DAY = 86_400
A, B = TaskKey("v", "a"), TaskKey("v", "b")


def minute(number: int, gpu: str = "g0", **values: float) -> GpuRollup:
    usual = {"watched": 1.0, "busy": 1.0, "samples": 12}
    return GpuRollup(MINUTE, NOW + number * MINUTE, gpu, **(usual | values))  # type: ignore[arg-type]


async def add(store: Store, *minutes: GpuRollup, key: TaskKey | None = None) -> None:
    await store.write(add_minutes, [(row, key) for row in minutes])


async def test_an_hour_is_built_from_its_minutes(store: Store) -> None:
    for key in (A, B):
        await store.write(record_start, key.validator, start_request(key.task_id), time.time())
    ids = store.read_now(job_ids, [A, B, TaskKey("v", "unknown")])
    assert sorted(ids) == [A, B]
    await add(store, minute(0, utilization=0.2, temperature=50, samples=10, busy=0.5), key=A)
    await add(store, minute(1, utilization=0.8, temperature=90, samples=20), minute(2, memory=0.5), key=B)
    await add(store, minute(60, utilization=1.0, busy=0.0))
    await add(store, minute(3, gpu="g1", busy=0.0))
    first, other, second = store.read_now(rollups, HOUR, 0)
    assert (first.at, first.gpu, other.gpu, second.at) == (NOW, "g0", "g1", NOW + HOUR)
    assert (first.job_id, other.job_id, second.job_id) == (ids[B], None, None)
    assert (first.watched, first.busy, first.samples) == pytest.approx((3 / 60, 2.5 / 60, 42))
    assert first.utilization == pytest.approx((0.2 * 10 + 0.8 * 20) / 30)
    assert (first.temperature, first.memory, first.tensor) == (90, 0.5, None)
    assert (other.busy, other.utilization) == (0.0, None)


async def test_a_minute_that_a_restart_cut_in_two_is_one_row_and_counted_once(store: Store) -> None:
    await add(store, minute(0, watched=0.25, busy=0.25, samples=3, utilization=0.4, temperature=70))
    await add(store, minute(0, watched=0.5, busy=0.5, samples=6, utilization=0.7, temperature=60, tensor=0.5))
    (row,) = store.read_now(rollups, MINUTE, 0)
    assert (row.watched, row.busy, row.samples) == (0.75, 0.75, 9)
    assert (row.utilization, row.temperature, row.tensor) == (pytest.approx(0.6), 70, 0.5)
    (hour,) = store.read_now(rollups, HOUR, 0)
    assert (hour.samples, hour.busy) == (9, pytest.approx(0.75 / 60))


async def test_old_minutes_are_pruned_while_their_hours_stay(store: Store) -> None:
    await add(store, minute(0), minute(1))
    assert await store.write(prune_rollups, NOW + 7 * DAY + MINUTE, 90 * DAY) == 1
    assert [row.at for row in store.read_now(rollups, MINUTE, 0)] == [NOW + MINUTE]
    assert await store.write(prune_rollups, NOW + 399 * DAY, 90 * DAY) == 1
    assert len(store.read_now(rollups, HOUR, 0)) == 1
    assert await store.write(prune_rollups, NOW + 401 * DAY, 500 * DAY) == 0
    assert await store.write(prune_rollups, NOW + 401 * DAY, 90 * DAY) == 1
