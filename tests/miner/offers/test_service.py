"""What is reserved: never more than there is, never GPUs that nobody holds; memory, store and fleet agree."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest

from core.domain.keys import GpuReservation, ReservationKind, TaskKey
from core.domain.tasks import TaskType
from miner.dev.samples import SampleTask
from miner.fleet.base import GpuOption
from miner.offers.service import LOWEST_PRIORITY
from miner.store.offers import open_reservations
from tests.miner.http.daemon_in_process import SECOND, VALIDATOR, DaemonInProcess, open_daemon, task

HOUR = 3600.0


def key(seed: int = 0, signer: Any = VALIDATOR) -> TaskKey:
    return TaskKey(signer.ss58_address, task(seed=seed).task_id)


async def jobs_and_holds(running: DaemonInProcess, hours: float = 0.0) -> tuple[set[TaskKey], set[TaskKey]]:
    """Jobs and held offers that are left hours later; store and fleet must agree."""
    await running.daemon.offer_service.expire(time.time() + hours * HOUR)
    reservations = running.daemon.offer_service.reservations
    stored = running.daemon.store.read_now(open_reservations)
    jobs, holds = reservations.jobs, set(reservations.holds)
    assert {row.reservation.hold.key for row in stored if row.deadline_at is not None} == jobs
    assert {row.reservation.hold.key for row in stored if row.deadline_at is None} == holds
    assert {hold.key for hold in running.daemon.fleet.ledger.reservations} == jobs | holds
    return jobs, holds


async def accepts(running: DaemonInProcess, seed: int, **how: Any) -> bool:
    return bool((await running.offer(task(seed=seed), **how)).json()["accepted"])


def holds(running: DaemonInProcess) -> dict[TaskKey, GpuReservation]:
    return {hold.key: hold for hold in running.daemon.fleet.ledger.reservations}


def age_decisions(running: DaemonInProcess, seconds: float) -> None:
    with sqlite3.connect(running.daemon.store.path) as connection:
        connection.execute("UPDATE decisions SET decided_at = decided_at - ?", (seconds,))
    connection.close()


# The limits


async def test_as_many_offers_are_accepted_as_max_jobs_also_when_all_come_at_once(tmp_path: Path) -> None:
    async with open_daemon(tmp_path, MAX_JOBS="3") as running:
        answers = await asyncio.gather(*(accepts(running, seed) for seed in range(20)))
        assert sum(answers) == len(running.daemon.offer_service.reservations.holds) == 3


async def test_as_many_offers_are_accepted_as_gpus_also_when_all_come_at_once(tmp_path: Path) -> None:
    async with open_daemon(tmp_path, GPUS="3xH100") as running:
        answers = await asyncio.gather(*(accepts(running, seed) for seed in range(20)))
        held = list(holds(running).values())
        assert sum(answers) == len(held) < 20
        for first, second in combinations(held, 2):
            follow = first.ends_at <= second.starts_at or second.ends_at <= first.starts_at
            assert follow or not set(first.gpus) & set(second.gpus)
        at_once = [gpu for hold in held if hold.starts_at <= time.time() for gpu in hold.gpus]
        assert sorted(at_once) == ["0", "1", "2"]


async def test_an_accepted_offer_keeps_its_lane(tmp_path: Path) -> None:
    async with open_daemon(tmp_path, GPUS="8xH100", PROFILE="h100x8") as running:
        assert any([await accepts(running, seed) for seed in range(20)])
        for held in running.daemon.offer_service.reservations.holds:
            claim = running.daemon.fleet.ledger.claim(held)
            assert claim.lane[0] in ("small", "medium", "large", "xlarge")


async def test_an_offer_holds_the_gpus_of_its_decision_in_fleet_and_store(running: DaemonInProcess) -> None:
    assert await accepts(running, 1)
    (hold,) = holds(running).values()
    assert (hold.key, hold.kind) == (key(1), ReservationKind.OFFER)
    (row,) = running.rows("SELECT gpus, starts_at, ends_at, priority FROM reservations")
    assert tuple(json.loads(row.pop("gpus"))) == hold.gpus
    assert tuple(row.values()) == (hold.starts_at, hold.ends_at, hold.priority)


async def test_an_offer_without_a_start_and_a_job_past_its_deadline_make_room(tmp_path: Path) -> None:
    async with open_daemon(tmp_path, MAX_JOBS="1", OFFER_HOLD_SECONDS="60") as running:
        assert await accepts(running, 1)
        assert not await accepts(running, 2)
        assert await jobs_and_holds(running, 0.5) == (set(), set())
        await running.start(task(seed=3))
        assert not await accepts(running, 4)
        assert await jobs_and_holds(running, 24) == (set(), set())
        assert await accepts(running, 5)


async def test_gpus_that_a_run_still_uses_are_not_given_away_at_its_deadline(tmp_path: Path) -> None:
    async with open_daemon(tmp_path, GPUS="1xH100") as running:
        await running.start(task(seed=1))
        fleet = running.daemon.fleet
        await fleet.acquire(key(1), [GpuOption(1)], until=time.time() + HOUR)
        await running.daemon.offer_service.expire(time.time() + 24 * HOUR)
        assert running.daemon.offer_service.reservations.jobs == set()
        before = holds(running)[key(1)]
        assert before.gpus == ("0",)
        assert not await accepts(running, 2) or holds(running)[key(2)].starts_at >= before.ends_at
        fleet.release(key(1))
        assert key(1) not in holds(running)


# Repeated offers


async def test_an_accepted_offer_stands_and_is_held_for_longer(tmp_path: Path) -> None:
    async with open_daemon(tmp_path, MAX_JOBS="1", OFFER_HOLD_SECONDS="900") as running:
        first = await running.offer(task(seed=1))
        held = running.daemon.offer_service.reservations.holds
        held[key(1)] -= 800
        age_decisions(running, 100_000)
        before = time.time()
        again = await running.offer(task(seed=1))
        assert again.json() == first.json()
        assert running.rows("SELECT count(*) AS n FROM decisions")[0]["n"] == 1
        (row,) = running.rows("SELECT lapses_at FROM reservations")
        assert held[key(1)] == row["lapses_at"] > before + 890


async def test_a_refusal_stands_for_a_while_and_is_decided_again_then(tmp_path: Path) -> None:
    async with open_daemon(tmp_path, MAX_JOBS="1", OFFER_HOLD_SECONDS="60") as running:
        assert await accepts(running, 1)
        assert not await accepts(running, 2)
        await jobs_and_holds(running, 1)
        assert not await accepts(running, 2)  # there is room now, but not yet another decision
        assert await jobs_and_holds(running) == (set(), set())
        age_decisions(running, 600)
        assert await accepts(running, 2)
        assert await jobs_and_holds(running) == (set(), {key(2)})
        rows = running.rows("SELECT offer_id, accepted FROM decisions ORDER BY id")
        assert [tuple(row.values()) for row in rows] == [(1, 1), (None, 0), (2, 1)]


async def test_a_lapsed_offer_is_decided_again_at_once(tmp_path: Path) -> None:
    async with open_daemon(tmp_path, MAX_JOBS="1", OFFER_HOLD_SECONDS="60") as running:
        assert await accepts(running, 1)
        await jobs_and_holds(running, 1)
        assert await accepts(running, 2)
        assert not await accepts(running, 1)  # another task has its place


async def test_the_same_offer_ten_times_at_once_is_one_reservation(running: DaemonInProcess) -> None:
    replies = await asyncio.gather(*(running.offer(task(seed=1)) for _ in range(10)))
    assert {reply.text for reply in replies} == {replies[0].text}
    assert len(holds(running)) == 1
    assert running.rows("SELECT times_seen FROM offers") == [{"times_seen": 10}]


async def test_a_task_offered_again_holds_nothing_more_while_its_job_runs_and_new_gpus_after_it(
    tmp_path: Path,
) -> None:
    async with open_daemon(tmp_path, MAX_JOBS="2") as running:
        assert await accepts(running, 1)
        await running.start(task(seed=1))
        assert await accepts(running, 1)
        assert await jobs_and_holds(running) == ({key(1)}, set())
        assert await accepts(running, 2)
        assert await jobs_and_holds(running, 24) == (set(), set())
        assert await accepts(running, 1)
        assert await jobs_and_holds(running) == (set(), {key(1)})
        assert await jobs_and_holds(running, 24) == (set(), set())


# Two validators


async def test_two_validators_with_one_task_id_are_two_tasks(tmp_path: Path) -> None:
    async with open_daemon(tmp_path, GPUS="2xH100", OFFER_HOLD_SECONDS="60") as running:
        assert await accepts(running, 1)
        assert await accepts(running, 1, signer=SECOND)
        assert set(holds(running)) == {key(1), key(1, SECOND)}
        await running.start(task(seed=1), signer=SECOND)
        assert await jobs_and_holds(running, 0.1) == ({key(1, SECOND)}, set())  # the other's offer has lapsed
        await running.start(task(seed=1))
        assert await jobs_and_holds(running) == ({key(1), key(1, SECOND)}, set())
        assert len(running.rows("SELECT * FROM jobs")) == 2


# Starts without an accepted offer


async def test_a_start_that_the_policy_would_accept_gets_its_gpus(running: DaemonInProcess) -> None:
    await running.start(task(seed=1))
    (hold,) = holds(running).values()
    assert (hold.kind, bool(hold.gpus)) == (ReservationKind.JOB, True)
    assert running.rows("SELECT firm, state, offer_id FROM reservations") == [
        {"firm": 1, "state": "started", "offer_id": None}
    ]
    assert running.rows("SELECT accepted, job_id, offer_id FROM decisions") == [
        {"accepted": 1, "job_id": 1, "offer_id": None}
    ]


async def test_a_start_that_the_policy_would_refuse_waits_behind_all_others(tmp_path: Path) -> None:
    async with open_daemon(tmp_path, MAX_JOBS="1", GPUS="1xH100") as running:
        assert await accepts(running, 1)
        reply = await running.start(task(seed=2))
        assert (reply.status_code, reply.json()["task_id"]) == (200, task(seed=2).task_id)
        assert holds(running)[key(2)].priority == LOWEST_PRIORITY
        (row,) = running.rows("SELECT firm FROM reservations WHERE task_id = ?", task(seed=2).task_id)
        assert not row["firm"]
        running.daemon.fleet.schedule()
        late = holds(running)[key(2)]
        assert not late.gpus or late.starts_at >= holds(running)[key(1)].ends_at
        assert running.rows("SELECT state FROM jobs") == [{"state": "queued"}]


TOO_LARGE = "unsloth/Meta-Llama-3.1-405B-Instruct"


async def start_infeasible(running: DaemonInProcess, sample: SampleTask) -> None:
    """Send a start that is stored as failed at once, and reserves nothing."""
    before = await jobs_and_holds(running)
    reply = await running.start(sample)
    assert reply.status_code == 200
    assert reply.json()["message"].startswith("Noted, but nothing can be trained")
    assert await jobs_and_holds(running) == before


async def test_a_start_that_cannot_be_done_is_stored_as_failed_and_decided_again_each_time(
    tmp_path: Path,
) -> None:
    async with open_daemon(tmp_path, GPUS="1xL4") as running:
        too_large = replace(task(), model=TOO_LARGE)
        await start_infeasible(running, too_large)
        assert running.rows("SELECT state, end_reason FROM jobs") == [
            {"state": "failed", "end_reason": "infeasible"}
        ]
        await running.start(replace(too_large, model=task().model, expected_repo_name="another"))
        assert running.rows("SELECT state, end_reason FROM jobs") == [{"state": "queued", "end_reason": None}]
        await start_infeasible(running, replace(task(seed=2), model=TOO_LARGE))  # while all GPUs are held
        (decision,) = running.rows("SELECT * FROM decisions WHERE job_id = 2")
        assert "no_memory" in str(decision)


async def test_a_start_past_its_deadline_is_stored_as_failed(running: DaemonInProcess) -> None:
    await start_infeasible(running, replace(task(), hours=0))
    assert running.rows("SELECT state, end_reason FROM jobs") == [
        {"state": "failed", "end_reason": "deadline"}
    ]


async def test_a_model_of_unknown_size_is_fetched_before_it_is_given_up(running: DaemonInProcess) -> None:
    await running.start(replace(task(), model="somebody/nameless"))
    assert running.rows("SELECT state FROM jobs") == [{"state": "queued"}]
    assert len(holds(running)) == 1


async def test_every_start_is_reported_and_a_second_one_changes_no_reservation(
    running: DaemonInProcess,
) -> None:
    job_ids: list[int] = []
    running.daemon.offer_service.on_started = job_ids.append
    await accepts(running, 1)
    await running.start(task(seed=1))
    before = holds(running)[key(1)]
    await running.start(task(seed=2))
    await running.start(task(seed=1).restarted(Random(5)))
    after = holds(running)[key(1)]
    assert (after.gpus, after.kind, after.priority) == (before.gpus, before.kind, before.priority)
    assert await jobs_and_holds(running) == ({key(1), key(2)}, set())
    assert job_ids == [1, 2, 1]


# Failures and restarts


@pytest.mark.parametrize("call", ["offer", "start"])
async def test_what_cannot_be_stored_is_not_reserved(
    running: DaemonInProcess, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr("miner.store.store.MAX_PENDING", 0)
    reply = await getattr(running, call)(task(TaskType.DPO))
    assert (reply.status_code, reply.json()["error"]) == (503, "store_unavailable")
    assert running.rows("SELECT * FROM nonces") == []
    reservations = running.daemon.offer_service.reservations
    assert (reservations.holds, reservations.jobs, holds(running)) == ({}, set(), {})


async def test_a_start_that_cannot_be_stored_leaves_the_offer_held(
    running: DaemonInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    await accepts(running, 1)
    before = holds(running)[key(1)]
    with monkeypatch.context() as full:
        full.setattr("miner.store.store.MAX_PENDING", 0)
        assert (await running.start(task(seed=1))).status_code == 503
    assert await jobs_and_holds(running) == (set(), {key(1)})
    after = holds(running)[key(1)]
    assert (after.kind, after.gpus) == (ReservationKind.OFFER, before.gpus)


async def test_an_offer_whose_gpus_are_not_free_after_all_is_refused(
    running: DaemonInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.daemon.fleet, "reserve", lambda *_, **__: False)
    reply = await running.offer(task(seed=1))
    assert reply.json() == {"message": "Not taken: no capacity at the moment", "accepted": False}
    assert await jobs_and_holds(running) == (set(), set())


async def test_reservations_survive_a_restart_with_their_gpus(tmp_path: Path) -> None:
    async with open_daemon(tmp_path, GPUS="4xH100") as running:
        await accepts(running, 1)
        await accepts(running, 2)
        await running.start(task(seed=2))
        await running.start(task(seed=3))
        running.daemon.fleet.schedule()
        before = {held: (hold.kind, hold.gpus) for held, hold in holds(running).items()}
    async with open_daemon(tmp_path, GPUS="4xH100") as running:
        assert {held: (hold.kind, hold.gpus) for held, hold in holds(running).items()} == before
        assert await jobs_and_holds(running) == ({key(2), key(3)}, {key(1)})
