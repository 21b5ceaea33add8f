"""Scans in the background: what the fleet, the job and the operator learn of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from core.domain.hardware import parse_gpus
from core.domain.keys import TaskKey
from miner.fleet import sources
from miner.fleet.base import GpuOption
from miner.fleet.fleet import Fleet
from miner.fleet.health import GpuHealth
from miner.fleet.inventory import AutoGpuSource, GpuInventory
from miner.fleet.sources import (
    FixedGpuSource,
    GpuScan,
    JoinedGpuSource,
    NoNvidiaDriver,
    ScanFailed,
    ScannedGpu,
    ScannedNode,
)
from miner.observe.alerts import MINER, AlertKind, AlertSubject, gpu_subject
from tests.doubles.each import each
from tests.miner.fleet.setups import H100

pytestmark = pytest.mark.process


KEY = TaskKey("v", "a")


class ScriptedSource:
    """A source that returns or raises `answer`."""

    def __init__(self, *gpus: ScannedGpu) -> None:
        self.answer: GpuScan | Exception = GpuScan(gpus, source="a script")
        self.scans = 0
        self.closed = False
        self.scanned = asyncio.Event()

    async def scan(self) -> GpuScan:
        self.scans += 1
        self.scanned.set()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def close(self) -> None:
        self.closed = True


def scanned(index: int, used: int = 0) -> ScannedGpu:
    return ScannedGpu(f"g{index}", index, H100, total_bytes=80 * 2**30, used_bytes=used)


class WatchedFleet:
    def __init__(self, source: Any, *, host: dict[str, Any] | None = None) -> None:
        self.now = 1000.0
        self.events: list[tuple[AlertKind, AlertSubject]] = []
        self.fleet = Fleet(clock=lambda: self.now)
        self.inventory = GpuInventory(
            source,
            self.fleet,
            GpuHealth(return_seconds=300.0, settle_seconds=60.0),
            lambda: ScannedNode("", "", host or {}),
            lambda kind, _text, subject=MINER: self.events.append((kind, subject)),
        )
        self.inventory.refresh_seconds = 3600.0

    async def scan(self, after: float = 0.0) -> None:
        self.now += after
        await self.inventory.scan()

    @property
    def unusable(self) -> list[bool]:
        return [gpu.unusable_reason is not None for gpu in self.fleet.inventory.gpus]


async def test_the_fleet_knows_the_gpus_and_the_host() -> None:
    watched = WatchedFleet(
        ScriptedSource(scanned(0), scanned(1)), host={"cpu_cores": 7, "disk_free_bytes": 5}
    )
    await watched.scan()
    hardware = watched.fleet.inventory.hardware
    assert (hardware.gpus.count, hardware.cpu_cores, hardware.disk_free_bytes) == (2, 7, 5)
    assert watched.fleet.inventory.installed == hardware
    assert (watched.inventory.source_name, watched.inventory.scanned_at) == ("a script", 1000.0)


async def test_the_fleet_knows_the_cores_near_to_each_gpu_of_this_machine_and_nothing_of_a_nodes() -> None:
    near = [replace(scanned(index), cores=cores) for index, cores in enumerate(["0-3", "", "4-7"])]
    cores = tuple((number,) for number in range(8))
    watched = WatchedFleet(ScriptedSource(*near), host={"cpu_cores": 8, "cores": cores})
    await watched.scan()
    hardware = watched.fleet.inventory.hardware
    assert (hardware.cores, hardware.near_cores) == (cores, ("0-3", "", "4-7"))


async def test_a_failed_scan_keeps_the_last_good_one_and_is_reported() -> None:
    source = ScriptedSource(scanned(0), scanned(1))
    watched = WatchedFleet(source)
    await watched.scan()
    source.answer = ScanFailed("the driver hangs")
    await watched.scan(5.0)
    await watched.scan(5.0)
    snapshot = watched.fleet.snapshot(0.0)
    assert (len(snapshot.usable), snapshot.problem) == (2, "the driver hangs")
    assert watched.events == [("inventory_unreadable", MINER)]
    source.answer = GpuScan((scanned(0), scanned(1)))
    await watched.scan(5.0)
    assert watched.fleet.snapshot(0.0).problem is None
    assert watched.events == [("inventory_unreadable", MINER), ("inventory_recovered", MINER)]


async def test_a_host_that_was_never_scanned_has_no_gpus_and_a_reason() -> None:
    source = ScriptedSource()
    source.answer = ScanFailed("no")
    watched = WatchedFleet(source)
    await watched.scan()
    inventory = watched.fleet.inventory
    assert (inventory.gpus, inventory.hardware, inventory.problem) == ((), None, "no")


async def test_a_bug_in_a_scan_does_not_end_the_scanning(caplog: pytest.LogCaptureFixture) -> None:
    source = ScriptedSource()
    source.answer = ZeroDivisionError("a bug")
    watched = WatchedFleet(source)
    await watched.inventory.start()
    await watched.inventory.stop()
    assert watched.fleet.inventory.problem == "scanning the GPUs failed; the daemon's log says why"
    assert "ZeroDivisionError" in caplog.text
    assert source.closed


async def test_a_lost_gpu_is_excluded_and_reported_to_job_and_operator() -> None:
    source = ScriptedSource(scanned(0), scanned(1))
    watched, lost = WatchedFleet(source), []
    watched.fleet.on_lost(lambda *what: lost.append(what))
    await watched.scan()
    await watched.fleet.acquire(KEY, [GpuOption(2)], until=9e9)
    source.answer = GpuScan((scanned(0),), {1: "GPU is lost"})
    await watched.scan(5.0)
    assert lost == [(KEY, "g1", "GPU is lost")]
    assert watched.events == [("gpu_out", gpu_subject("g1"))]
    assert watched.unusable == [False, True]
    assert watched.fleet.usable_count == 1


async def test_a_released_gpu_is_scanned_soon_and_granted_when_empty() -> None:
    source = ScriptedSource(scanned(0, used=70 * 2**30))
    watched = WatchedFleet(source)
    await watched.inventory.start()
    try:
        watched.fleet.adopt(KEY, ["g0"], until=9e9)
        source.scanned.clear()
        watched.fleet.release(KEY)
        await asyncio.wait_for(source.scanned.wait(), 120)
        other = asyncio.create_task(watched.fleet.acquire(TaskKey("v", "b"), [GpuOption(1)], until=9e9))
        await asyncio.sleep(0)
        assert not other.done()
        source.answer = GpuScan((scanned(0),))
        await watched.scan(5.0)
        assert (await other).ids == ("g0",)
        assert watched.events == []
    finally:
        await watched.inventory.stop()


async def test_the_start_does_not_wait_for_a_slow_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miner.fleet.inventory.FIRST_SCAN_SECONDS", 0.01)

    class Slow(ScriptedSource):
        async def scan(self) -> GpuScan:
            await asyncio.Event().wait()
            raise AssertionError

    watched = WatchedFleet(Slow())
    await watched.inventory.start()
    assert watched.fleet.inventory.gpus == ()
    await watched.inventory.stop()


async def test_a_host_without_a_driver_gets_the_pretend_gpu_and_keeps_it() -> None:
    driver, fallback = ScriptedSource(), ScriptedSource(scanned(0))
    driver.answer = NoNvidiaDriver("no library")
    source = AutoGpuSource(driver, fallback)
    assert len((await source.scan()).gpus) == 1
    assert len((await source.scan()).gpus) == 1
    assert (driver.scans, driver.closed) == (1, True)


async def test_a_driver_that_disappears_is_a_failed_scan_without_a_pretend_gpu() -> None:
    driver, fallback = ScriptedSource(scanned(0)), ScriptedSource(scanned(5))
    source = AutoGpuSource(driver, fallback)
    await source.scan()
    driver.answer = NoNvidiaDriver("no library")
    with pytest.raises(ScanFailed):
        await source.scan()
    assert fallback.scans == 0


@each(
    ("gpus", "ids", "links"),
    [
        ("2xH100", ["0", "1"], [{"1"}, {"0"}]),
        ("4xA100-PCIE-80GB", ["0", "1", "2", "3"], [{"1"}, {"0"}, {"3"}, {"2"}]),
        ("2xL40S", ["0", "1"], [set(), set()]),
        ("cpu", ["cpu"], [set()]),
        ("2xcpu", ["cpu", "cpu:1"], [set(), set()]),
    ],
)
async def test_gpus_from_settings_have_their_usual_links(
    gpus: str, ids: list[str], links: list[set[str]]
) -> None:
    scan = await FixedGpuSource(parse_gpus(gpus), "x").scan()
    assert [gpu.id for gpu in scan.gpus] == ids
    assert [set(gpu.linked) for gpu in scan.gpus] == links
    assert all(gpu.used_bytes is None for gpu in scan.gpus)


async def test_gpus_without_known_memory_are_granted_again_at_once() -> None:
    watched = WatchedFleet(FixedGpuSource(parse_gpus("1xH100"), "x"))
    await watched.scan()
    await watched.fleet.acquire(KEY, [GpuOption(1)], until=9e9)
    watched.fleet.release(KEY)
    assert (await watched.fleet.acquire(TaskKey("v", "b"), [GpuOption(1)], until=9e9)).ids == ("0",)


class Cluster:
    """Two GPUs of the node n1, until it is away."""

    away = False

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.answers.set()

    async def scan(self) -> GpuScan:
        await self.answers.wait()
        if self.away:
            raise ScanFailed("slurmctld does not answer")
        gpus = tuple(replace(scanned(index), id=f"{index}@n1", node="n1") for index in range(2))
        node = ScannedNode("n1", "slurm", {"cpu_cores": 96}, "idle")
        return GpuScan(gpus, source="Slurm", nodes=(node,))

    async def close(self) -> None:
        return None


async def test_this_machine_and_a_cluster_are_one_fleet_of_nodes() -> None:
    cluster = Cluster()
    cluster.away = True
    watched = WatchedFleet(JoinedGpuSource(ScriptedSource(scanned(0)), cluster), host={"cpu_cores": 7})
    await watched.scan()
    assert (watched.fleet.inventory.gpus, watched.fleet.inventory.problem) == (
        (),
        "slurmctld does not answer",
    )
    cluster.away = False
    await watched.scan()
    here, node = watched.fleet.inventory.nodes
    assert (here.name, here.installed.cpu_cores, here.installed.gpus.count) == ("", 7, 1)
    assert (node.name, node.backend, node.state, node.installed.cpu_cores) == ("n1", "slurm", "idle", 96)
    assert watched.fleet.inventory.installed == node.installed
    grant = await watched.fleet.acquire(KEY, [GpuOption(2)], until=9e9)
    assert grant.ids == ("0@n1", "1@n1")


async def test_a_cluster_that_does_not_answer_delays_nothing_here_and_takes_no_new_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sources, "CLUSTER_WAIT_S", 0.01)
    cluster, here = Cluster(), ScriptedSource(scanned(0))
    watched = WatchedFleet(JoinedGpuSource(here, cluster))
    await watched.scan()
    assert (await watched.fleet.acquire(KEY, [GpuOption(2)], until=9e9)).ids == ("0@n1", "1@n1")
    cluster.away = True
    cluster.answers.clear()
    here.answer = GpuScan((scanned(0), scanned(1)))
    await watched.scan()
    assert [gpu.id for gpu in watched.fleet.snapshot(0.0).usable] == ["g0", "g1", "0@n1", "1@n1"]
    cluster.answers.set()
    await watched.scan()
    state = watched.fleet.inventory
    assert (state.problem, [nodes.backend for nodes in state.classes]) == (None, [""])
    assert {gpu.unusable_reason for gpu in state.gpus if gpu.node} == {"taken out: slurmctld does not answer"}
    assert watched.fleet.is_in_use("0@n1")
    cluster.away = False
    await watched.scan()
    assert len(watched.fleet.snapshot(0.0).usable) == 4
    assert watched.events == [("inventory_unreadable", MINER), ("inventory_recovered", MINER)]


async def test_a_job_goes_on_although_its_node_is_not_listed_any_more() -> None:
    # Taken out of the partition or out of SLURM_NODES: Slurm goes on with what runs there.
    cluster = ScriptedSource(*(await Cluster().scan()).gpus)
    watched, lost = WatchedFleet(cluster), list[str]()
    watched.fleet.on_lost(lambda _key, gpu, _why: lost.append(gpu))
    await watched.scan()
    await watched.fleet.acquire(KEY, [GpuOption(1)], until=9e9)
    cluster.answer = GpuScan(())
    await watched.scan()
    assert (lost, watched.unusable) == ([], [True])
    watched.fleet.release(KEY)
    await watched.scan()
    assert watched.fleet.inventory.gpus == ()
