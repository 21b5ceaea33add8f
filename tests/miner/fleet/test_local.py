"""Waiting for GPUs, getting them, losing them."""

from __future__ import annotations

import asyncio

import pytest

from core.hardware import KINDS, PCIE_BANDWIDTH, GpuSet, Hardware, Link
from miner.fleet.base import Fleet, Gpu, Grant, Hold, HoldKind, Placement, TaskKey
from miner.fleet.local import LocalFleet, Stock
from miner.fleet.schedule import Rules
from tests.miner.fleet.setups import H100, HOUR, cards

A, B = TaskKey("v", "a"), TaskKey("w", "a")


def stock(gpus: list[Gpu], **more: object) -> Stock:
    usable = [gpu for gpu in gpus if gpu.out is None]
    hardware = Hardware(gpus=GpuSet(kind=H100, count=len(usable))) if usable else None
    return Stock(tuple(gpus), hardware, **more)  # type: ignore[arg-type]


def fleet_of(count: int, **rules: object) -> LocalFleet:
    return LocalFleet(stock(cards(count)), clock=lambda: 0.0, rules=Rules(**rules))  # type: ignore[arg-type]


async def acquire(on: Fleet, key: TaskKey, *counts: int, priority: float = 0.0) -> Grant:
    return await on.acquire(key, counts, until=HOUR, priority=priority)


async def waiting(on: LocalFleet, key: TaskKey, *counts: int, priority: float = 0.0) -> asyncio.Task[Grant]:
    task = asyncio.create_task(acquire(on, key, *counts, priority=priority))
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_free_gpus_are_given_at_once() -> None:
    grant = await acquire(fleet_of(4), A, 2)
    assert grant == Grant(A, ("g0", "g1"), GpuSet(kind=H100, count=2))


async def test_who_waits_is_woken_by_a_release() -> None:
    on = fleet_of(1)
    await acquire(on, A, 1)
    task = await waiting(on, B, 1)
    assert [claim.key for claim in on.queue()] == [B]
    on.release(A)
    assert (await task).key == B


async def test_leaving_the_queue_leaves_it_to_the_others() -> None:
    on = fleet_of(1)
    await acquire(on, A, 1)
    first, second = await waiting(on, B, 1, priority=1), await waiting(on, TaskKey("x", "c"), 1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    on.release(B)
    on.release(A)
    assert (await second).ids == ("g0",)


async def test_gpus_given_in_the_moment_of_leaving_are_not_lost() -> None:
    on = fleet_of(1)
    await acquire(on, A, 1)
    task = await waiting(on, B, 1)
    on.release(A)  # B has them now, and never hears of it
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    on.release(B)
    assert (await acquire(on, A, 1)).ids == ("g0",)


async def test_asking_twice_for_one_task_is_asking_once() -> None:
    on = fleet_of(1)
    await acquire(on, A, 1)
    first, second = await waiting(on, B, 1), await waiting(on, B, 1)
    with pytest.raises(asyncio.CancelledError):
        await first
    on.release(A)
    assert (await second).key == B
    assert len(on.snapshot(0.0).holds) == 1


async def test_a_release_ends_the_wait_of_its_own_task() -> None:
    on = fleet_of(1)
    await acquire(on, A, 1)
    task = await waiting(on, B, 1)
    on.release(B)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [hold.key for hold in on.snapshot(0.0).holds] == [A]


async def test_the_snapshot_shows_everybody() -> None:
    on = fleet_of(2)
    placed = Placement(("g1",), HOUR / 2, 2 * HOUR)
    assert on.promise(B, placed, until=3 * HOUR, priority=2.0)
    await acquire(on, A, 1)
    seen = on.snapshot(7.0)
    assert seen.taken_at == 7.0
    assert set(seen.holds) == {
        Hold(A, HoldKind.JOB, ("g0",), 0.0, HOUR),
        Hold(B, HoldKind.OFFER, ("g1",), HOUR / 2, 3 * HOUR, 2.0),
    }
    assert seen.hardware == on.could_have(A)


async def test_a_job_is_told_of_its_lost_card_once() -> None:
    on, told = fleet_of(4), []
    on.on_lost(lambda *what: told.append(what))
    await acquire(on, A, 2)
    broken = stock(cards(4, out=[1, 3]), failed={"g1": "it is gone", "g3": "it is gone"})
    on.update(broken)
    on.update(broken)
    assert told == [(A, "g1", "it is gone")]
    on.update(stock(cards(4, out=[3]), failed={"g3": "it is gone"}))
    on.update(broken)
    assert told == [(A, "g1", "it is gone")] * 2, "it came back and failed again"
    on.release(A)
    assert (await acquire(on, A, 4, 2)).ids == ("g0", "g2")


async def test_one_listeners_mistake_does_not_keep_the_others_from_hearing() -> None:
    on, told = fleet_of(1), []

    def broken(*_: object) -> None:
        raise RuntimeError("on purpose")

    on.on_lost(broken)
    on.on_lost(lambda *what: told.append(what))
    await acquire(on, A, 1)
    on.update(stock(cards(1, out=[0]), failed={"g0": "gone"}))
    assert told == [(A, "g0", "gone")]


async def test_a_card_is_given_again_when_a_look_finds_it_empty() -> None:
    on = LocalFleet(stock(cards(1), sees_memory=True), clock=lambda: 5.0)
    await acquire(on, A, 1)
    on.release(A)
    assert on.released_at == {"g0": 5.0}
    task = await waiting(on, B, 1)
    on.update(stock(cards(1), sees_memory=True, unclean=frozenset(["g0"])))
    assert not task.done()
    on.update(stock(cards(1), sees_memory=True))
    assert (await task).ids == ("g0",)


async def test_cards_without_a_link_are_planned_for_without() -> None:
    on = LocalFleet(stock(cards(4, links=[(0, 1), (2, 3)])), clock=lambda: 0.0)
    pair, rest = await acquire(on, A, 2), await acquire(on, B, 2)
    assert pair.gpus.link is rest.gpus.link is Link.NVLINK
    on.release(A)
    on.release(B)
    far = await acquire(on, A, 3)
    assert far.gpus.link is Link.PCIE
    assert far.gpus.kind.link_bandwidth == PCIE_BANDWIDTH


async def test_a_restart_takes_up_what_was_promised() -> None:
    on = fleet_of(2)
    on.restore(
        [
            (Hold(A, HoldKind.OFFER, ("g0",), 0.0, HOUR), True),
            (Hold(B, HoldKind.JOB, ("g1",), 0.0, HOUR), True),
        ]
    )
    assert on.adopt(B, ["g1"], until=2 * HOUR) == Grant(B, ("g1",), GpuSet(kind=KINDS["H100-SXM"], count=1))
    assert on.adopt(A, ["g1"], until=2 * HOUR) is None
    on.extend(B, 9 * HOUR)
    assert {hold.key: hold.ends_at for hold in on.snapshot(0.0).holds} == {A: HOUR, B: 9 * HOUR}


async def test_the_same_look_again_changes_nothing_and_cleans_what_was_used() -> None:
    def empty() -> Stock:
        return stock(cards(1), sees_memory=True)

    on = LocalFleet(empty(), clock=lambda: 5.0)
    before = on.snapshot(5.0)
    on.update(empty())
    assert on.snapshot(5.0).gpus is before.gpus
    await acquire(on, A, 1)
    on.release(A)
    task = await waiting(on, B, 1)
    on.update(empty())
    assert (await task).ids == ("g0",)
