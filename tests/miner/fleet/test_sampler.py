"""Measurements in the background: what the history and the store get of them, and what failures cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.domain.keys import TaskKey
from miner.api.samples import GpuRollup, GpuSample, HostSample
from miner.fleet.base import Gpu, InventoryState
from miner.fleet.fleet import Fleet
from miner.fleet.nvml import NumberedSample
from miner.fleet.sampler import MAX_PAUSE_SECONDS, GpuSampler, HostMeter, SampleHistory, samples_of_fleet
from miner.fleet.sources import NoNvidiaDriver, ScanFailed
from miner.store import database
from miner.store.database import StoreUnavailable
from miner.store.samples import HOUR, MINUTE, gpu_kinds, rollups
from miner.store.store import Store
from tests.miner.fleet.setups import H100, make_gpus

START = 1_700_000_000 // HOUR * HOUR
KEY = TaskKey("v", "a")


class ScriptedGpus:
    """GPUs that measure `values`, or fail with them."""

    def __init__(self) -> None:
        self.values: dict[str, Any] | Exception = {"utilization": 0.9, "temperature": 60.0}
        self.asked = 0
        self.closed = False

    async def sample(self) -> list[NumberedSample]:
        self.asked += 1
        if isinstance(self.values, Exception):
            raise self.values
        return [NumberedSample(0, GpuSample(0.0, "g0", **self.values))]

    async def close(self) -> None:
        self.closed = True


class MeasuredHost:
    def __init__(self, store: Store, folder: Path) -> None:
        self.now = float(START)
        self.gpus, self.history = ScriptedGpus(), SampleHistory()
        self.fleet = Fleet(clock=lambda: self.now)
        self.fleet.update(InventoryState(gpus=tuple(make_gpus(2))))
        self.store = store
        host = HostMeter(folder)
        self.sampler = GpuSampler(self.gpus, self.fleet, self.history, store, host, interval=5.0)

    async def go(self, seconds: float, step: float = 5.0) -> None:
        """Sample until so much time has passed."""
        until = self.now + seconds
        while self.now < until:
            self.now += step
            await self.sampler.sample()

    def rows(self, period: int = MINUTE) -> dict[tuple[int, str], GpuRollup]:
        return {((row.at - START) // period, row.gpu): row for row in self.store.read_now(rollups, period, 0)}


@pytest.fixture
async def measured(tmp_path: Path) -> AsyncIterator[MeasuredHost]:
    store = Store(database.prepare_store(tmp_path))
    store.writer.start(asyncio.get_running_loop())
    yield MeasuredHost(store, tmp_path)
    await store.writer.close()


async def test_each_minute_becomes_a_row_of_each_gpu_also_where_nothing_is_measured(
    measured: MeasuredHost,
) -> None:
    await measured.sampler.sample()
    measured.fleet.ledger.adopt(KEY, ["g0", "g1"], now=measured.now, until=measured.now + HOUR)
    await measured.go(30)
    measured.fleet.release(KEY)
    measured.gpus.values = {"utilization": 0.5, "temperature": 80.0}
    await measured.go(40)
    rows = measured.rows()
    assert sorted(rows) == [(0, "g0"), (0, "g1")]
    first, other = rows[0, "g0"], rows[0, "g1"]
    assert (first.watched, first.busy, first.samples) == (1.0, 0.5, 12)
    assert first.utilization == pytest.approx((0.9 * 7 + 0.5 * 5) / 12)
    assert first.temperature == 80.0
    assert (other.busy, other.samples, other.utilization) == (0.5, 0, None)
    assert measured.rows(HOUR)[0, "g1"].busy == pytest.approx(0.5 / 60)
    assert measured.store.read_now(gpu_kinds) == measured.fleet.inventory.kinds  # for their prices
    latest = measured.history.latest("g0")
    assert (latest.at, latest.utilization, measured.history.gpus) == (measured.now, 0.5, ["g0"])
    assert measured.history.host is not None


async def test_of_a_clusters_gpus_only_those_of_our_jobs_are_counted(measured: MeasuredHost) -> None:
    first, second = make_gpus(2)
    nodes = replace(first, id="0@n1", node="n1"), replace(second, id="1@n1", node="n1")
    measured.fleet.update(InventoryState(gpus=nodes))
    await measured.sampler.sample()
    measured.fleet.ledger.adopt(KEY, ["0@n1"], now=measured.now, until=measured.now + HOUR)
    await measured.go(70)
    rows = measured.rows()
    assert list(rows) == [(0, "0@n1")]
    assert (rows[0, "0@n1"].busy, rows[0, "0@n1"].samples) == (1.0, 0)


async def test_a_stop_in_the_middle_of_a_minute_and_a_new_start_count_nothing_twice(
    measured: MeasuredHost,
) -> None:
    await measured.sampler.sample()
    await measured.go(30)
    measured.sampler.start()
    await measured.sampler.stop()
    assert measured.gpus.closed
    assert measured.rows()[0, "g0"].watched == 0.5
    again = GpuSampler(
        measured.gpus,
        measured.fleet,
        measured.history,
        measured.store,
        HostMeter(Path("/")),
        interval=5.0,
    )
    measured.sampler = again
    await again.sample()
    await measured.go(35)
    row = measured.rows()[0, "g0"]
    assert (row.watched, row.samples) == (1.0, 13)


async def test_a_driver_that_fails_is_left_alone_longer_each_time_and_time_is_counted_on(
    measured: MeasuredHost,
) -> None:
    measured.gpus.values = ScanFailed("the driver hangs")
    await measured.go(60)
    assert measured.sampler.problem == "the driver hangs"
    assert measured.gpus.asked == 4  # after 5, 15 and 35 seconds again
    measured.gpus.values = {"utilization": 0.1}
    await measured.go(80)
    assert measured.sampler.problem is None
    assert measured.rows()[0, "g0"].watched == pytest.approx(55 / 60)
    assert measured.rows()[0, "g0"].samples == 0
    measured.gpus.values = NoNvidiaDriver("no library")
    asked = measured.gpus.asked
    await measured.go(MAX_PAUSE_SECONDS - 5)
    assert measured.gpus.asked == asked + 1


async def test_what_a_full_disk_refuses_is_stored_later(
    measured: MeasuredHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = []

    def refuse(*arguments: object) -> None:
        refusals.append(arguments)
        raise StoreUnavailable("the disk is full")

    await measured.sampler.sample()
    await measured.go(55)
    with monkeypatch.context() as patched:
        patched.setattr(measured.store, "write", refuse)
        await measured.go(10)
    await measured.go(5)
    assert len(refusals) == 2
    assert measured.rows()[0, "g0"].samples == 12


async def test_a_mistake_does_not_end_the_measurements(
    measured: MeasuredHost, caplog: pytest.LogCaptureFixture
) -> None:
    measured.sampler.interval = 0.01
    measured.gpus.values = ValueError("a bug")
    measured.sampler.start()
    while measured.gpus.asked < 2:
        await asyncio.sleep(0)
    await measured.sampler.stop()
    assert "measuring failed unexpectedly" in caplog.text


async def test_time_in_which_the_machine_slept_is_not_watched(measured: MeasuredHost) -> None:
    await measured.sampler.sample()
    await measured.go(60)
    await measured.go(7200, step=7200)
    await measured.go(60)
    assert sum(row.watched for (_, gpu), row in measured.rows().items() if gpu == "g0") <= 2


def test_gpus_are_found_by_uuid_and_by_number_only_where_there_are_no_uuids() -> None:
    def names(*ids: str) -> list[str]:
        gpus = [Gpu(name, index, H100) for index, name in enumerate(ids)]
        found = [NumberedSample(0, GpuSample(0.0, "GPU-a")), NumberedSample(1, GpuSample(0.0, "cpu"))]
        return [sample.gpu for sample in samples_of_fleet(gpus, found, 1.0)]

    assert names("GPU-a", "GPU-b") == ["GPU-a"]
    assert names("0", "1", "2") == ["0", "1"]
    assert names("cpu", "cpu:1") == ["cpu"]


def test_the_host_is_measured_between_two_samples(tmp_path: Path) -> None:
    stat, meminfo = tmp_path / "stat", tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 400 kB\n")
    stat.write_text("cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 2 3\n")
    meter = HostMeter(tmp_path, stat=stat, meminfo=meminfo)
    first = meter.sample(1.0)
    assert (first.cpu, first.memory_share) == (None, 0.6)
    assert first.disk_free_bytes
    stat.write_text("cpu  150 0 100 840 110 0 0 0 0 0\n")
    assert meter.sample(2.0).cpu == pytest.approx(0.25)
    missing = HostMeter(tmp_path / "gone", stat=tmp_path / "no", meminfo=tmp_path / "no").sample(1.0)
    assert (missing.cpu, missing.memory_share, missing.disk_free_bytes) == (None, None, None)


async def test_a_clock_that_is_put_back_leaves_no_samples_of_the_future_and_no_endless_pause(
    measured: MeasuredHost,
) -> None:
    await measured.go(60)
    measured.gpus.values = ScanFailed("the driver hangs")
    await measured.go(20)
    measured.gpus.values = {"utilization": 0.1}
    measured.now -= 30 * 86_400
    await measured.go(10)
    assert [sample.at for sample in measured.history.since("g0", 0)] == [measured.now - 5, measured.now]
    assert len(measured.history.host_since(0)) == 2


def test_the_history_keeps_an_hour_and_forgets_gpus_that_are_gone() -> None:
    history = SampleHistory()
    for at in range(0, 4100, 100):
        history.add([GpuSample(at, "g0")] if at <= 300 else [GpuSample(at, "g1")], HostSample(at))
    assert history.gpus == ["g1"]
    assert [sample.at for sample in history.since("g1", 3800)] == [3800, 3900, 4000]
    assert len(history.since("g1", 0)) == 37
    assert history.latest("g1", since=4050) is None
    assert [sample.at for sample in history.host_since(4000)] == [4000]
