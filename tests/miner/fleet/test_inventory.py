"""Looking in the background: what the fleet, the job and the operator are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from miner.fleet.base import TaskKey
from miner.fleet.fixed import FixedSource
from miner.fleet.health import Health
from miner.fleet.inventory import AutoSource, Inventory
from miner.fleet.local import LocalFleet
from miner.fleet.looks import CannotLook, Look, NoDriver, Seen
from miner.fleet.nvml import NvmlSource
from tests.doubles.each import each
from tests.doubles.nvml import LOST, NvmlHost, uuid
from tests.miner.fleet.setups import H100

KEY = TaskKey("v", "a")


class Scripted:
    """Answers with whatever it was given last."""

    def __init__(self, *cards: Seen) -> None:
        self.answer: Look | Exception = Look(cards, source="a script")
        self.looks = 0
        self.closed = False
        self.looked = asyncio.Event()

    async def look(self) -> Look:
        self.looks += 1
        self.looked.set()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def close(self) -> None:
        self.closed = True


def seen(index: int, used: int = 0) -> Seen:
    return Seen(f"g{index}", index, H100, total_bytes=80 * 2**30, used_bytes=used)


class Watched:
    def __init__(self, source: Any, *, host: dict[str, Any] | None = None) -> None:
        self.now = 1000.0
        self.told: list[tuple[str, str | None]] = []
        self.fleet = LocalFleet(clock=lambda: self.now)
        self.inventory = Inventory(
            source,
            self.fleet,
            Health(return_seconds=300.0, settle_seconds=60.0),
            lambda: host or {},
            lambda kind, _text, gpu=None: self.told.append((kind, gpu)),
            refresh_seconds=3600.0,
            clock=lambda: self.now,
        )

    async def look(self, after: float = 0.0) -> None:
        self.now += after
        await self.inventory.look()

    @property
    def outs(self) -> list[bool]:
        return [gpu.out is not None for gpu in self.fleet.stock.gpus]


async def test_the_fleet_knows_the_cards_and_the_host_around_them() -> None:
    watched = Watched(Scripted(seen(0), seen(1)), host={"cpu_cores": 7, "disk_free_bytes": 5})
    await watched.look()
    hardware = watched.fleet.snapshot(0.0).hardware
    assert hardware is not None
    assert (hardware.gpus.count, hardware.cpu_cores, hardware.disk_free_bytes) == (2, 7, 5)
    assert watched.fleet.stock.installed == hardware
    assert (watched.inventory.source_name, watched.inventory.looked_at) == ("a script", 1000.0)


async def test_what_can_not_be_read_keeps_the_last_good_look_and_says_so() -> None:
    source = Scripted(seen(0), seen(1))
    watched = Watched(source)
    await watched.look()
    source.answer = CannotLook("the driver hangs")
    await watched.look(5.0)
    await watched.look(5.0)
    snapshot = watched.fleet.snapshot(0.0)
    assert (len(snapshot.usable), snapshot.trouble) == (2, "the driver hangs")
    assert watched.told == [("inventory_unreadable", None)]
    source.answer = Look((seen(0), seen(1)))
    await watched.look(5.0)
    assert watched.fleet.snapshot(0.0).trouble is None
    assert watched.told == [("inventory_unreadable", None), ("inventory_recovered", None)]


async def test_a_host_that_was_never_read_has_no_gpus_and_a_reason() -> None:
    source = Scripted()
    source.answer = CannotLook("no")
    watched = Watched(source)
    await watched.look()
    snapshot = watched.fleet.snapshot(0.0)
    assert (snapshot.gpus, snapshot.hardware, snapshot.trouble) == ((), None, "no")


async def test_a_mistake_of_ours_leaves_the_daemon_looking(caplog: pytest.LogCaptureFixture) -> None:
    source = Scripted()
    source.answer = ZeroDivisionError("a bug")
    watched = Watched(source)
    await watched.inventory.start()
    await watched.inventory.stop()
    assert watched.fleet.stock.trouble == "looking at the GPUs failed; the daemon's log says why"
    assert "ZeroDivisionError" in caplog.text
    assert source.closed


async def test_a_lost_card_is_told_to_its_job_and_to_the_operator_and_is_out_at_once() -> None:
    source = Scripted(seen(0), seen(1))
    watched, lost = Watched(source), []
    watched.fleet.on_lost(lambda *what: lost.append(what))
    await watched.look()
    await watched.fleet.acquire(KEY, [2], until=9e9, priority=0.0)
    source.answer = Look((seen(0),), {1: "GPU is lost"})
    await watched.look(5.0)
    assert lost == [(KEY, "g1", "GPU is lost")]
    assert watched.told == [("gpu_out", "g1")]
    assert watched.outs == [False, True]
    assert watched.fleet.could_have(KEY) == watched.fleet.stock.hardware
    assert watched.fleet.usable_count == 1


async def test_a_released_card_is_looked_at_soon_and_given_on_when_it_is_empty() -> None:
    source = Scripted(seen(0, used=70 * 2**30))
    watched = Watched(source)
    await watched.inventory.start()
    try:
        watched.fleet.adopt(KEY, ["g0"], until=9e9)
        source.looked.clear()
        watched.fleet.release(KEY)
        await asyncio.wait_for(source.looked.wait(), 120)
        other = asyncio.create_task(watched.fleet.acquire(TaskKey("v", "b"), [1], until=9e9, priority=0.0))
        await asyncio.sleep(0)
        assert not other.done()
        source.answer = Look((seen(0),))
        await watched.look(5.0)
        assert (await other).ids == ("g0",)
        assert watched.told == []
    finally:
        await watched.inventory.stop()


async def test_the_start_does_not_wait_for_a_slow_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miner.fleet.inventory.FIRST_LOOK_SECONDS", 0.01)

    class Slow(Scripted):
        async def look(self) -> Look:
            await asyncio.Event().wait()
            raise AssertionError

    watched = Watched(Slow())
    await watched.inventory.start()
    assert watched.fleet.stock.gpus == ()
    await watched.inventory.stop()


async def test_a_host_without_a_driver_gets_the_pretend_card_and_keeps_it() -> None:
    driver, otherwise = Scripted(), Scripted(seen(0))
    driver.answer = NoDriver("no library")
    source = AutoSource(driver, otherwise)
    assert len((await source.look()).cards) == 1
    assert len((await source.look()).cards) == 1
    assert (driver.looks, driver.closed) == (1, True)


async def test_a_driver_that_goes_away_is_trouble_and_no_pretend_card() -> None:
    driver, otherwise = Scripted(seen(0)), Scripted(seen(5))
    source = AutoSource(driver, otherwise)
    await source.look()
    driver.answer = NoDriver("no library")
    with pytest.raises(CannotLook):
        await source.look()
    assert otherwise.looks == 0


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
async def test_cards_by_name_are_linked_as_is_usual(gpus: str, ids: list[str], links: list[set[str]]) -> None:
    from core.hardware import parse_gpus

    look = await FixedSource(parse_gpus(gpus), "x").look()
    assert [card.id for card in look.cards] == ids
    assert [set(card.linked) for card in look.cards] == links
    assert all(card.used_bytes is None for card in look.cards)


async def test_a_fleet_of_cards_that_nobody_looks_at_gives_them_on_at_once() -> None:
    from core.hardware import parse_gpus

    watched = Watched(FixedSource(parse_gpus("1xH100"), "x"))
    await watched.look()
    await watched.fleet.acquire(KEY, [1], until=9e9, priority=0.0)
    watched.fleet.release(KEY)
    assert (await watched.fleet.acquire(TaskKey("v", "b"), [1], until=9e9, priority=0.0)).ids == ("0",)


async def test_from_the_driver_to_the_job_and_back(nvml_host: Callable[..., NvmlHost]) -> None:
    """All of it, with the stub library: eight cards, one of them lost under a job, reset, and watched."""
    host = nvml_host(8)
    source = NvmlSource()
    watched, lost = Watched(source), []
    watched.fleet.on_lost(lambda *what: lost.append(what))
    try:
        await watched.look()
        grant = await watched.fleet.acquire(KEY, [2], until=9e9, priority=0.0)
        assert grant.ids == (uuid(0), uuid(1))
        for index in (0, 1):
            host.card(index, used_mib=70_000, processes=1)
        host.card(1, error=LOST)
        await watched.look(5.0)
        assert [(key, gpu) for key, gpu, _ in lost] == [(KEY, uuid(1))]
        assert watched.outs == [False, True, *[False] * 6]
        watched.fleet.release(KEY)
        host.card(0, used_mib=4, processes=0)
        host.card(1, error=0, used_mib=4, processes=0)
        await watched.look(5.0)
        assert watched.outs[1]
        await watched.look(301.0)
        assert watched.outs == [False] * 8
        assert watched.told == [("gpu_out", uuid(1)), ("gpu_back", uuid(1))]
    finally:
        await watched.inventory.stop()
