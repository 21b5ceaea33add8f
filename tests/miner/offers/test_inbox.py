"""What is promised: never more than there is room for, never a place that nobody holds."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from core.tasks import TaskType
from tests.miner.api.house import SECOND, House, open_house, task

HOUR = 3600.0


async def settled(house: House, hours: float) -> tuple[set[str], set[str]]:
    """Jobs and holds, in memory, that hours later are still there; the books must say the same."""
    await house.daemon.inbox.settle(time.time() + hours * HOUR)
    promises, books = house.daemon.inbox.promises, house.daemon.books.commitments()
    assert {entry.task_id for entry in books.jobs} == promises.jobs
    assert {entry.task_id for entry in books.holds} == promises.holds
    return promises.jobs, promises.holds


async def accepts(house: House, seed: int, **how: Any) -> bool:
    return bool((await house.offer(task(seed=seed), **how)).json()["accepted"])


async def test_there_are_as_many_promises_as_places_also_when_all_ask_at_once(
    tmp_path: Path, template: Path
) -> None:
    async with open_house(tmp_path, template, MAX_JOBS="3") as house:
        answers = await asyncio.gather(*(accepts(house, seed) for seed in range(20)))
        assert sum(answers) == 3
        assert len(house.daemon.inbox.promises.holds) == 3


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


async def test_a_task_offered_again_after_its_job_ended_holds_a_place_that_lapses(
    tmp_path: Path, template: Path
) -> None:
    async with open_house(tmp_path, template, MAX_JOBS="1") as house:
        assert await accepts(house, 1)
        await house.start(task(seed=1))
        assert await settled(house, 24) == (set(), set())
        assert await accepts(house, 1)
        assert await settled(house, 0) == (set(), {task(seed=1).task_id})
        assert await settled(house, 48) == (set(), set())
        assert await accepts(house, 2)


async def test_a_task_offered_again_while_its_job_runs_takes_no_second_place(
    tmp_path: Path, template: Path
) -> None:
    async with open_house(tmp_path, template, MAX_JOBS="2") as house:
        await accepts(house, 1)
        await house.start(task(seed=1))
        assert await accepts(house, 1)
        assert await settled(house, 0) == ({task(seed=1).task_id}, set())
        assert await accepts(house, 2)


async def test_a_hold_of_another_validator_lapses_without_freeing_a_running_job(
    tmp_path: Path, template: Path
) -> None:
    async with open_house(tmp_path, template, MAX_JOBS="1", OFFER_HOLD_SECONDS="60") as house:
        await house.start(task(seed=1))
        assert await accepts(house, 1, signer=SECOND)
        jobs, holds = await settled(house, 0.5)
        assert (jobs, holds) == ({task(seed=1).task_id}, set())
        assert not await accepts(house, 2)


async def test_one_of_two_holds_on_a_task_lapses_and_the_other_stays(tmp_path: Path, template: Path) -> None:
    async with open_house(tmp_path, template, OFFER_HOLD_SECONDS="60") as house:
        await accepts(house, 1)
        await house.daemon.books.settle(time.time() + 50)
        await accepts(house, 1, signer=SECOND)
        with sqlite3.connect(house.daemon.books.path) as connection:
            connection.execute("UPDATE reservations SET lapses_at = lapses_at - 59 WHERE offer_id = 1")
        connection.close()
        await settled(house, 5 / 3600)
        assert house.daemon.inbox.promises.holds == {task(seed=1).task_id}


@pytest.mark.parametrize("call", ["offer", "start"])
async def test_what_can_not_be_written_is_not_promised(
    house: House, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr("miner.store.writer.MAX_PENDING", 0)
    reply = await getattr(house, call)(task(TaskType.DPO))
    assert (reply.status_code, reply.json()["error"]) == (503, "store_unavailable")
    assert house.daemon.inbox.promises.holds == house.daemon.inbox.promises.jobs == set()
    assert house.rows("SELECT * FROM nonces") == []
