"""What is promised: never more than there is room for, never a place that nobody holds."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest

from core.tasks import TaskType
from miner.dev.samples import SampleTask
from miner.fleet.base import Hold, HoldKind, TaskKey
from miner.offers.promises import LOWEST
from tests.miner.api.house import SECOND, VALIDATOR, House, open_house, task

HOUR = 3600.0


def key(seed: int = 0, signer: Any = VALIDATOR) -> TaskKey:
    return TaskKey(signer.ss58_address, task(seed=seed).task_id)


async def settled(house: House, hours: float) -> tuple[set[TaskKey], set[TaskKey]]:
    """Jobs and holds that are still there hours later; books and fleet must say the same."""
    await house.daemon.inbox.settle(time.time() + hours * HOUR)
    promises, taken = house.daemon.inbox.promises, house.daemon.books.taken()
    jobs, holds = promises.jobs, set(promises.holds)
    assert {one.place.hold.key for one in taken if one.deadline_at is not None} == jobs
    assert {one.place.hold.key for one in taken if one.deadline_at is None} == holds
    assert {hold.key for hold in house.daemon.fleet.ledger.holds} == jobs | holds
    return jobs, holds


async def accepts(house: House, seed: int, **how: Any) -> bool:
    return bool((await house.offer(task(seed=seed), **how)).json()["accepted"])


def holds(house: House) -> dict[TaskKey, Hold]:
    return {hold.key: hold for hold in house.daemon.fleet.ledger.holds}


def age_answers(house: House, seconds: float) -> None:
    with sqlite3.connect(house.daemon.books.path) as connection:
        connection.execute("UPDATE decisions SET decided_at = decided_at - ?", (seconds,))
    connection.close()


# Room


async def test_there_are_as_many_promises_as_places_also_when_all_ask_at_once(
    tmp_path: Path, template: Path
) -> None:
    async with open_house(tmp_path, template, MAX_JOBS="3") as house:
        answers = await asyncio.gather(*(accepts(house, seed) for seed in range(20)))
        assert sum(answers) == 3
        assert len(house.daemon.inbox.promises.holds) == 3


async def test_a_promise_knows_its_lane(tmp_path: Path, template: Path) -> None:
    async with open_house(tmp_path, template, GPUS="8xH100", PROFILE="h100x8") as house:
        assert any([await accepts(house, seed) for seed in range(20)])
        for promised in house.daemon.inbox.promises.holds:
            claim = house.daemon.fleet.ledger.claim(promised)
            assert claim is not None
            assert claim.lane is not None
            name, terms = claim.lane
            assert name in ("small", "medium", "large", "xlarge")
            assert terms.overflow


async def test_there_are_as_many_promises_as_gpus_also_when_all_ask_at_once(
    tmp_path: Path, template: Path
) -> None:
    async with open_house(tmp_path, template, GPUS="3xH100") as house:
        answers = await asyncio.gather(*(accepts(house, seed) for seed in range(20)))
        assert sum(answers) == len(holds(house)) < 20
        for one, other in combinations(holds(house).values(), 2):
            follow = one.ends_at <= other.starts_at or other.ends_at <= one.starts_at
            assert follow or not set(one.gpus) & set(other.gpus)
        at_once = [
            gpu for hold in holds(house).values() if hold.starts_at <= time.time() for gpu in hold.gpus
        ]
        assert sorted(at_once) == ["0", "1", "2"]


async def test_an_offer_holds_the_gpus_that_its_decision_names(house: House) -> None:
    assert await accepts(house, 1)
    (hold,) = holds(house).values()
    assert (hold.key, hold.kind) == (key(1), HoldKind.OFFER)
    (kept,) = house.rows("SELECT gpus, starts_at, ends_at, priority FROM reservations")
    assert kept["gpus"] == f'["{hold.gpus[0]}"]'
    assert (kept["starts_at"], kept["ends_at"], kept["priority"]) == (
        hold.starts_at,
        hold.ends_at,
        hold.priority,
    )


async def test_a_hold_that_no_start_follows_lapses_and_makes_room(tmp_path: Path, template: Path) -> None:
    async with open_house(tmp_path, template, MAX_JOBS="1", OFFER_HOLD_SECONDS="60") as house:
        assert await accepts(house, 1)
        assert not await accepts(house, 2)
        assert await settled(house, 0.5) == (set(), set())
        assert await accepts(house, 3)


async def test_a_deadline_that_passes_makes_room(tmp_path: Path, template: Path) -> None:
    async with open_house(tmp_path, template, MAX_JOBS="1") as house:
        await house.start(task(seed=1))
        assert not await accepts(house, 2)
        assert await settled(house, 24) == (set(), set())
        assert await accepts(house, 3)


async def test_gpus_that_a_run_still_uses_are_not_given_away_at_its_deadline(
    tmp_path: Path, template: Path
) -> None:
    async with open_house(tmp_path, template, GPUS="1xH100") as house:
        await house.start(task(seed=1))
        fleet = house.daemon.fleet
        await fleet.acquire(key(1), [1], until=time.time() + HOUR, priority=0.0)
        await house.daemon.inbox.settle(time.time() + 24 * HOUR)
        assert house.daemon.inbox.promises.jobs == set()
        before = holds(house)[key(1)]
        assert before.gpus == ("0",)
        assert not await accepts(house, 2) or holds(house)[key(2)].starts_at >= before.ends_at
        fleet.release(key(1))
        assert key(1) not in holds(house)


# Asked again


async def test_an_accepted_offer_stands_and_is_held_for_longer(tmp_path: Path, template: Path) -> None:
    async with open_house(tmp_path, template, MAX_JOBS="1", OFFER_HOLD_SECONDS="900") as house:
        first = await house.offer(task(seed=1))
        house.daemon.inbox.promises.holds[key(1)] -= 800
        age_answers(house, 100_000)
        again = await house.offer(task(seed=1))
        assert again.json() == first.json()
        assert house.rows("SELECT count(*) AS n FROM decisions")[0]["n"] == 1
        (kept,) = house.rows("SELECT lapses_at FROM reservations")
        assert house.daemon.inbox.promises.holds[key(1)] == kept["lapses_at"] > time.time() + 890


async def test_a_refusal_stands_for_a_while_and_is_decided_anew_then(tmp_path: Path, template: Path) -> None:
    async with open_house(tmp_path, template, MAX_JOBS="1", OFFER_HOLD_SECONDS="60") as house:
        assert await accepts(house, 1)
        assert not await accepts(house, 2)
        await settled(house, 1)
        assert not await accepts(house, 2)  # there is room now, but not yet another answer
        assert await settled(house, 0) == (set(), set())
        age_answers(house, 600)
        assert await accepts(house, 2)
        assert await settled(house, 0) == (set(), {key(2)})
        kept = house.rows("SELECT offer_id, accepted FROM decisions ORDER BY id")
        assert [tuple(row.values()) for row in kept] == [(1, 1), (None, 0), (2, 1)]


async def test_a_lapsed_offer_is_decided_anew_at_once(tmp_path: Path, template: Path) -> None:
    async with open_house(tmp_path, template, MAX_JOBS="1", OFFER_HOLD_SECONDS="60") as house:
        assert await accepts(house, 1)
        await settled(house, 1)
        assert await accepts(house, 2)
        assert not await accepts(house, 1)  # somebody else has its place


async def test_the_same_offer_twice_at_once_is_one_promise(house: House) -> None:
    replies = await asyncio.gather(*(house.offer(task(seed=1)) for _ in range(10)))
    assert {reply.text for reply in replies} == {replies[0].text}
    assert len(holds(house)) == 1
    assert house.rows("SELECT times_seen FROM offers") == [{"times_seen": 10}]


async def test_a_task_offered_again_after_its_job_ended_holds_a_place_that_lapses(
    tmp_path: Path, template: Path
) -> None:
    async with open_house(tmp_path, template, MAX_JOBS="1") as house:
        assert await accepts(house, 1)
        await house.start(task(seed=1))
        assert await settled(house, 24) == (set(), set())
        assert await accepts(house, 1)
        assert await settled(house, 0) == (set(), {key(1)})
        assert await settled(house, 24) == (set(), set())


async def test_a_task_offered_again_while_its_job_runs_takes_no_second_place(
    tmp_path: Path, template: Path
) -> None:
    async with open_house(tmp_path, template, MAX_JOBS="2") as house:
        await accepts(house, 1)
        await house.start(task(seed=1))
        assert await accepts(house, 1)
        assert await settled(house, 0) == ({key(1)}, set())
        assert await accepts(house, 2)


# Two validators


async def test_two_validators_with_one_task_id_are_two_tasks(tmp_path: Path, template: Path) -> None:
    async with open_house(tmp_path, template, GPUS="2xH100") as house:
        assert await accepts(house, 1)
        assert await accepts(house, 1, signer=SECOND)
        assert set(holds(house)) == {key(1), key(1, SECOND)}
        await house.start(task(seed=1), signer=SECOND)
        await house.start(task(seed=1))
        assert await settled(house, 0) == ({key(1), key(1, SECOND)}, set())
        assert len(house.rows("SELECT * FROM jobs")) == 2


async def test_a_hold_of_another_validator_lapses_without_freeing_a_running_job(
    tmp_path: Path, template: Path
) -> None:
    async with open_house(tmp_path, template, MAX_JOBS="2", OFFER_HOLD_SECONDS="60") as house:
        await house.start(task(seed=1))
        assert await accepts(house, 1, signer=SECOND)
        assert await settled(house, 0.5) == ({key(1)}, set())


# Starts that no accepted offer went before


async def test_such_a_start_is_held_its_gpus_where_the_policy_would_have_taken_it(house: House) -> None:
    await house.start(task(seed=1))
    (hold,) = holds(house).values()
    assert (hold.kind, len(hold.gpus)) == (HoldKind.JOB, 1)
    (kept,) = house.rows("SELECT firm, state, offer_id FROM reservations")
    assert kept == {"firm": 1, "state": "started", "offer_id": None}
    (decision,) = house.rows("SELECT accepted, job_id, offer_id FROM decisions")
    assert decision == {"accepted": 1, "job_id": 1, "offer_id": None}


async def test_such_a_start_waits_behind_all_others_where_the_policy_would_not(
    tmp_path: Path, template: Path
) -> None:
    async with open_house(tmp_path, template, MAX_JOBS="1", GPUS="1xH100") as house:
        assert await accepts(house, 1)
        reply = await house.start(task(seed=2))
        assert (reply.status_code, reply.json()["task_id"]) == (200, task(seed=2).task_id)
        assert holds(house)[key(2)].priority == LOWEST
        assert not house.rows("SELECT firm FROM reservations WHERE task_id = ?", task(seed=2).task_id)[0][
            "firm"
        ]
        house.daemon.fleet.arrange()
        late = holds(house)[key(2)]
        assert not late.gpus or late.starts_at >= holds(house)[key(1)].ends_at
        assert house.rows("SELECT state FROM jobs") == [{"state": "queued"}]


async def hopeless(house: House, sample: SampleTask) -> None:
    reply = await house.start(sample)
    assert reply.status_code == 200
    assert reply.json()["message"].startswith("Noted, but nothing can be trained")
    assert holds(house) == {}
    assert await settled(house, 0) == (set(), set())


async def test_a_start_that_can_not_be_done_at_all_is_noted_as_failed(tmp_path: Path, template: Path) -> None:
    async with open_house(tmp_path, template, GPUS="1xL4") as house:
        await hopeless(house, replace(task(), model="unsloth/Meta-Llama-3.1-405B-Instruct"))
        (job,) = house.rows("SELECT state, end_reason FROM jobs")
        assert job == {"state": "failed", "end_reason": "infeasible"}


async def test_so_is_one_that_comes_while_all_gpus_are_held(tmp_path: Path, template: Path) -> None:
    async with open_house(tmp_path, template, GPUS="1xL4") as house:
        await house.start(task(seed=1))
        (before,) = holds(house)
        reply = await house.start(replace(task(seed=2), model="unsloth/Meta-Llama-3.1-405B-Instruct"))
        assert reply.json()["message"].startswith("Noted, but nothing can be trained")
        assert set(holds(house)) == {before}
        assert house.rows("SELECT state, end_reason FROM jobs ORDER BY id") == [
            {"state": "queued", "end_reason": None},
            {"state": "failed", "end_reason": "infeasible"},
        ]
        (kept,) = house.rows("SELECT * FROM decisions WHERE job_id = 2")
        assert "no_memory" in str(kept)


async def test_a_start_whose_time_is_over_already_is_noted_as_failed(house: House) -> None:
    await hopeless(house, replace(task(), hours=0))
    (job,) = house.rows("SELECT state, end_reason FROM jobs")
    assert job == {"state": "failed", "end_reason": "deadline"}


async def test_a_model_of_unknown_size_is_looked_at_before_it_is_given_up(house: House) -> None:
    await house.start(replace(task(), model="somebody/nameless"))
    assert house.rows("SELECT state FROM jobs") == [{"state": "queued"}]
    assert len(holds(house)) == 1


async def test_a_start_of_a_hopeless_task_is_judged_anew_each_time(tmp_path: Path, template: Path) -> None:
    async with open_house(tmp_path, template, GPUS="1xL4") as house:
        large = replace(task(), model="unsloth/Meta-Llama-3.1-405B-Instruct")
        await hopeless(house, large)
        await house.start(replace(large, model=task().model, expected_repo_name="another"))
        assert house.rows("SELECT state, end_reason FROM jobs") == [{"state": "queued", "end_reason": None}]
        assert len(holds(house)) == 1


async def test_a_second_start_changes_nothing_about_what_is_held(house: House) -> None:
    await accepts(house, 1)
    await house.start(task(seed=1))
    before = holds(house)[key(1)]
    await house.start(task(seed=1).restarted(Random(5)))
    after = holds(house)[key(1)]
    assert (after.gpus, after.kind, after.priority) == (before.gpus, before.kind, before.priority)
    assert await settled(house, 0) == ({key(1)}, set())


async def test_jobs_are_told_of_every_start(house: House) -> None:
    told: list[int] = []
    house.daemon.inbox.on_started = told.append
    await house.start(task(seed=1))
    await house.start(task(seed=2))
    await house.start(task(seed=1).restarted(Random(5)))
    assert told == [1, 2, 1]


# What goes wrong


@pytest.mark.parametrize("call", ["offer", "start"])
async def test_what_can_not_be_written_is_not_promised(
    house: House, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr("miner.store.writer.MAX_PENDING", 0)
    reply = await getattr(house, call)(task(TaskType.DPO))
    assert (reply.status_code, reply.json()["error"]) == (503, "store_unavailable")
    promises = house.daemon.inbox.promises
    assert (promises.holds, promises.jobs, holds(house)) == ({}, set(), {})
    assert house.rows("SELECT * FROM nonces") == []


async def test_a_start_that_can_not_be_written_leaves_the_offer_held(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    await accepts(house, 1)
    before = holds(house)
    with monkeypatch.context() as full:
        full.setattr("miner.store.writer.MAX_PENDING", 0)
        assert (await house.start(task(seed=1))).status_code == 503
    assert await settled(house, 0) == (set(), {key(1)})
    assert holds(house)[key(1)].kind is HoldKind.OFFER
    assert holds(house)[key(1)].gpus == before[key(1)].gpus


async def test_a_place_that_is_not_free_after_all_is_refused_and_not_promised(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(house.daemon.fleet, "promise", lambda *_, **__: False)
    reply = await house.offer(task(seed=1))
    assert reply.json() == {"message": "Not taken: no capacity at the moment", "accepted": False}
    assert await settled(house, 0) == (set(), set())


async def test_promises_are_taken_up_with_their_gpus_after_a_restart(tmp_path: Path, template: Path) -> None:
    async with open_house(tmp_path, template, GPUS="4xH100") as house:
        await accepts(house, 1)
        await accepts(house, 2)
        await house.start(task(seed=2))
        await house.start(task(seed=3))
        house.daemon.fleet.arrange()
        before = holds(house)
    async with open_house(tmp_path, template, GPUS="4xH100") as house:
        after = holds(house)
        assert {one: (hold.kind, hold.gpus) for one, hold in after.items()} == {
            one: (hold.kind, hold.gpus) for one, hold in before.items()
        }
        assert await settled(house, 0) == ({key(2), key(3)}, {key(1)})
