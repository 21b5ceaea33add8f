"""A data directory with a long history: real decisions of a daemon, then copied until there are enough."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from random import Random

from core.domain.tasks import OFFERED_TASKS
from miner.dev.samples import SampleTask, sample_task, unknown_task
from miner.dev.stack import DevStack, daemon_process
from miner.dev.validator import ValidatorClient, ValidatorOutcome
from miner.store import database
from miner.store.database import FILE_NAME, insert_row

#: Offers that the daemon really answers, and starts.
REAL_OFFERS = 60
DAY = 86_400.0


def fill_store(stack: DevStack, jobs: int, offers: int, **settings: str) -> None:
    """Let a daemon answer some offers, stop it, and multiply what it stored."""
    with daemon_process(stack, {"POLICY": "h100x4", "GPUS": "4xH100", **settings}):
        asyncio.run(_play(stack))
    path = stack.data_dir / FILE_NAME
    with closing(database.connect(path)) as connection, connection:
        connection.execute("BEGIN")
        _copy_offers(connection, offers, time.time())
        _copy_jobs(connection, stack.data_dir, jobs, time.time())
        connection.execute("COMMIT")


async def _play(stack: DevStack) -> None:
    random, started = Random(7), 0
    async with ValidatorClient(stack.url, stack.keys.validator, stack.keys.miner.ss58_address) as validator:
        for number in range(REAL_OFFERS):
            task = _task(random, number)
            answer = await validator.offer(task)
            if answer.conclusion.outcome is ValidatorOutcome.ACCEPTED and started < 3:
                await validator.start(task)
                started += 1


def _task(random: Random, number: int) -> SampleTask:
    if number % 7 == 6:
        return unknown_task(random)
    return sample_task(OFFERED_TASKS[number % len(OFFERED_TASKS)], random)


def _copy_offers(connection: sqlite3.Connection, wanted: int, now: float) -> None:
    rows = connection.execute("SELECT * FROM offers ORDER BY id").fetchall()
    for number in range(wanted - len(rows)):
        row = dict(rows[number % len(rows)])
        at = now - 14 * DAY * (1 - number / wanted) - 60
        row |= {"task_id": f"copy-{number:06d}", "received_at": at, "last_seen_at": at}
        del row["id"]
        insert_row(connection, "offers", **row)


def _copy_jobs(connection: sqlite3.Connection, data_dir: Path, wanted: int, now: float) -> None:
    rows = connection.execute("SELECT * FROM jobs ORDER BY id").fetchall()
    for number in range(wanted - len(rows)):
        row = dict(rows[number % len(rows)])
        ended_at = now - 30 * DAY * (1 - number / wanted)
        failed = number % 23 == 0
        row |= {
            "task_id": f"job-{number:06d}",
            "state": "failed" if failed else "done",
            "end_reason": "crashed" if failed else "published",
            "started_at": ended_at - 3 * 3600 - number % 5 * 900,
            "deadline_at": ended_at + 3600,
            "ended_at": ended_at,
            "updated_at": ended_at,
            "submission_repo": None if failed else f"miner/model-{number}",
            "submission_hash": None if failed else "0" * 64,
        }
        del row["id"]
        job_id = insert_row(connection, "jobs", **row)
        folder = data_dir / "jobs" / str(job_id) / "attempts" / "1"
        insert_row(
            connection,
            "attempts",
            job_id=job_id,
            number=1,
            backend="process",
            key=f"copy-{job_id}-1",
            folder=str(folder),
            gpus=json.dumps(["GPU-0"]),
            started_at=row["started_at"] + 60,
            end_by=row["deadline_at"],
            ended_at=ended_at,
            end_reason=row["end_reason"],
            detail="",
        )
