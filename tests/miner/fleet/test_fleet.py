"""Waiting for GPUs, getting them, losing them."""

from __future__ import annotations

import asyncio

import pytest

from core.domain.hardware import GPU_KINDS, PCIE_BANDWIDTH, GpuLink, GpuSet
from core.domain.keys import GpuReservation, Placement, ReservationKind, TaskKey
from miner.fleet.base import GpuGrant, GpuOption, InventoryState
from miner.fleet.fleet import Fleet
from miner.fleet.schedule import QueueRules
from tests.miner.fleet.setups import H100, HOUR, inventory_of, make_gpus

A, B = TaskKey("v", "a"), TaskKey("w", "a")


def fleet_of(count: int, **rules: object) -> Fleet:
    return Fleet(inventory_of(make_gpus(count)), clock=lambda: 0.0, rules=QueueRules(**rules))  # type: ignore[arg-type]


async def acquire(on: Fleet, key: TaskKey, *counts: int) -> GpuGrant:
    return await on.acquire(key, [GpuOption(count) for count in counts], until=HOUR)


async def waiting(on: Fleet, key: TaskKey, *counts: int) -> asyncio.Task[GpuGrant]:
    task = asyncio.create_task(acquire(on, key, *counts))
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_free_gpus_are_given_at_once() -> None:
    grant = await acquire(fleet_of(4), A, 2)
    assert grant == GpuGrant(A, ("g0", "g1"), GpuSet(kind=H100, count=2))


async def test_a_release_wakes_the_next_in_the_queue() -> None:
    on = fleet_of(1)
    await acquire(on, A, 1)
    task = await waiting(on, B, 1)
    assert [claim.key for claim in on.queue()] == [B]
    on.release(A)
    assert (await task).key == B


async def test_what_goes_on_after_a_restart_has_its_gpus_again_before_the_first_scan_gives_them_away() -> (
    None
):
    on = Fleet(clock=lambda: 0.0)
    assert on.adopt(A, ["g0"], until=HOUR) is None
    task = await waiting(on, B, 1)
    on.update(inventory_of(make_gpus(1)))
    await asyncio.sleep(0)
    assert not task.done()
    assert on.adopt(A, ["g0"], until=HOUR) == GpuGrant(A, ("g0",), GpuSet(kind=H100, count=1))
    on.release(A)
    assert (await task).key == B


async def test_a_cancelled_wait_leaves_the_queue() -> None:
    on = fleet_of(1)
    await acquire(on, A, 1)
    first, second = await waiting(on, B, 1), await waiting(on, TaskKey("x", "c"), 1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    on.release(B)
    on.release(A)
    assert (await second).ids == ("g0",)


async def test_gpus_granted_while_leaving_are_not_lost() -> None:
    on = fleet_of(1)
    await acquire(on, A, 1)
    task = await waiting(on, B, 1)
    on.release(A)  # B has them now, and never hears of it
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    on.release(B)
    assert (await acquire(on, A, 1)).ids == ("g0",)


async def test_a_second_acquire_of_a_task_replaces_the_first() -> None:
    on = fleet_of(1)
    await acquire(on, A, 1)
    first, second = await waiting(on, B, 1), await waiting(on, B, 1)
    with pytest.raises(asyncio.CancelledError):
        await first
    on.release(A)
    assert (await second).key == B
    assert len(on.snapshot(0.0).reservations) == 1


async def test_a_release_ends_the_wait_of_its_own_task() -> None:
    on = fleet_of(1)
    await acquire(on, A, 1)
    task = await waiting(on, B, 1)
    on.release(B)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [reservation.key for reservation in on.snapshot(0.0).reservations] == [A]


async def test_the_snapshot_has_all_reservations() -> None:
    on = fleet_of(2)
    placed = Placement(("g1",), HOUR / 2, 3 * HOUR)
    assert on.reserve(B, placed, priority=2.0)
    await acquire(on, A, 1)
    seen = on.snapshot(7.0)
    assert seen.taken_at == 7.0
    assert set(seen.reservations) == {
        GpuReservation(A, ReservationKind.JOB, ("g0",), 0.0, HOUR),
        GpuReservation(B, ReservationKind.OFFER, ("g1",), HOUR / 2, 3 * HOUR, 2.0),
    }
    assert seen.inventory is on.inventory


async def test_a_lost_gpu_is_reported_to_its_job_once() -> None:
    on, reported = fleet_of(4), []
    on.on_lost(lambda *what: reported.append(what))
    await acquire(on, A, 2)
    broken = inventory_of(make_gpus(4, unusable=[1, 3]), failed={"g1": "it is gone", "g3": "it is gone"})
    on.update(broken)
    on.update(broken)
    assert reported == [(A, "g1", "it is gone")]
    on.update(inventory_of(make_gpus(4, unusable=[3]), failed={"g3": "it is gone"}))
    on.update(broken)
    assert reported == [(A, "g1", "it is gone")] * 2, "it came back and failed again"
    on.release(A)
    assert (await acquire(on, A, 4, 2)).ids == ("g0", "g2")


async def test_a_failing_listener_does_not_silence_the_others() -> None:
    on, reported = fleet_of(1), []

    def broken(*_: object) -> None:
        raise RuntimeError("on purpose")

    on.on_lost(broken)
    on.on_lost(lambda *what: reported.append(what))
    await acquire(on, A, 1)
    on.update(inventory_of(make_gpus(1, unusable=[0]), failed={"g0": "gone"}))
    assert reported == [(A, "g0", "gone")]


async def test_a_gpu_is_granted_again_when_a_scan_finds_it_empty() -> None:
    on = Fleet(inventory_of(make_gpus(1), sees_memory=True), clock=lambda: 5.0)
    await acquire(on, A, 1)
    on.release(A)
    assert on.released_at == {"g0": 5.0}
    task = await waiting(on, B, 1)
    on.update(inventory_of(make_gpus(1), sees_memory=True, unclean=frozenset(["g0"])))
    assert not task.done()
    on.update(inventory_of(make_gpus(1), sees_memory=True))
    assert (await task).ids == ("g0",)


async def test_gpus_without_a_link_are_granted_as_pcie() -> None:
    on = Fleet(inventory_of(make_gpus(4, links=[(0, 1), (2, 3)])), clock=lambda: 0.0)
    pair, rest = await acquire(on, A, 2), await acquire(on, B, 2)
    assert pair.gpus.link is rest.gpus.link is GpuLink.NVLINK
    on.release(A)
    on.release(B)
    far = await acquire(on, A, 3)
    assert far.gpus.link is GpuLink.PCIE
    assert far.gpus.kind.link_bandwidth == PCIE_BANDWIDTH


async def test_reservations_and_runs_survive_a_restart() -> None:
    on = fleet_of(2)
    on.restore(
        [
            (GpuReservation(A, ReservationKind.OFFER, ("g0",), 0.0, HOUR), True),
            (GpuReservation(B, ReservationKind.JOB, ("g1",), 0.0, HOUR), True),
        ]
    )
    assert on.adopt(B, ["g1"], until=2 * HOUR) == GpuGrant(
        B, ("g1",), GpuSet(kind=GPU_KINDS["H100-SXM"], count=1)
    )
    assert on.adopt(A, ["g1"], until=2 * HOUR) is None
    on.extend(B, 9 * HOUR)
    assert {reservation.key: reservation.ends_at for reservation in on.snapshot(0.0).reservations} == {
        A: HOUR,
        B: 9 * HOUR,
    }


async def test_an_equal_scan_changes_nothing_but_cleans_used_gpus() -> None:
    def empty() -> InventoryState:
        return inventory_of(make_gpus(1), sees_memory=True)

    on = Fleet(empty(), clock=lambda: 5.0)
    before = on.snapshot(5.0)
    on.update(empty())
    assert on.snapshot(5.0).gpus is before.gpus
    await acquire(on, A, 1)
    on.release(A)
    task = await waiting(on, B, 1)
    on.update(empty())
    assert (await task).ids == ("g0",)


async def test_a_snapshot_without_a_task_that_holds_nothing_has_the_same_reservations() -> None:
    """Cached refusals are compared by identity."""
    on = fleet_of(2)
    await acquire(on, A, 1)
    assert on.snapshot(0.0, without=B).reservations is on.snapshot(0.0).reservations
    assert on.snapshot(0.0, without=A).reservations == ()


async def test_an_adopted_run_takes_the_window_of_who_was_to_get_its_gpu() -> None:
    on = fleet_of(2)
    assert on.reserve(A, Placement(("g0",), 0.0, HOUR))
    assert on.adopt(B, ["g0"], until=2 * HOUR)
    assert {one.key: one.gpus for one in on.snapshot(0.0).reservations} == {A: ("g1",), B: ("g0",)}


async def test_only_adopted_and_extended_runs_that_change_somebody_elses_window_need_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on, passes = fleet_of(2), list[float]()
    monkeypatch.setattr(on.ledger, "schedule", lambda now: passes.append(now) or [])
    assert on.adopt(A, ["g0"], until=HOUR)
    assert on.extend(A, 2 * HOUR) == 2 * HOUR
    assert on.reserve(B, Placement(("g1",), 0.0, HOUR))
    assert not passes
    assert on.adopt(A, ["g1"], until=HOUR)
    assert passes
