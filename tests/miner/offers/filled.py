"""Books with offers and jobs in them, written by the store's own functions."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from core.wire import MinerTaskOffer
from miner.fleet.base import Hold, HoldKind, TaskKey
from miner.jobs.states import EndReason, JobState
from miner.offers.decision import Decision
from miner.store import database, jobs, offers
from miner.store.jobs import Start
from miner.store.offers import Place
from tests.miner.offers.builders import HOUR, NOON, decided

VALIDATOR = "5Validator"


@lru_cache(maxsize=1)
def _empty() -> bytes:
    """Made once: the migrations take longer than a test."""
    with TemporaryDirectory() as folder:
        return database.prepare(Path(folder)).read_bytes()


@contextmanager
def books(folder: Path) -> Iterator[sqlite3.Connection]:
    path = folder / database.FILE_NAME
    if not path.exists():
        path.write_bytes(_empty())
    with closing(database.connect(path)) as connection:
        yield connection


def answer(
    connection: sqlite3.Connection,
    asked: MinerTaskOffer,
    at: float = NOON,
    decision: Decision | None = None,
    validator: str = VALIDATOR,
) -> Decision:
    """An offer with its decision, and its place if it was accepted."""
    decision = decision or decided(asked, now=at)
    place = None
    if decision.accepted and decision.placement is not None:
        there = decision.placement
        key = TaskKey(validator, asked.task_id)
        hold = Hold(key, HoldKind.OFFER, there.gpus, there.starts_at, there.ends_at, decision.priority)
        place = Place(hold, firm=True, lapses_at=at + 900)
    offers.record(
        connection, validator, asked, b"{}", decision, place, now=at, is_kept=False, refusal_stands_for=0
    )
    return decision


def lapse(connection: sqlite3.Connection, task_id: str, validator: str = VALIDATOR) -> None:
    offers.lapse(connection, [TaskKey(validator, task_id)])


def job(
    connection: sqlite3.Connection,
    asked: MinerTaskOffer,
    at: float = NOON,
    *,
    state: JobState = JobState.DONE,
    reason: EndReason | None = None,
    request: Any = None,
    decision: Decision | None = None,
    validator: str = VALIDATOR,
) -> int:
    """A start, and what became of it an hour later; `decision`: judged without an offer."""
    raw = json.dumps(request or {}).encode()
    start = Start(asked.task_id, asked.task_type, asked.model, asked.hours_to_complete, "repo", at, raw)
    started = jobs.record_start(connection, validator, start, at)
    if decision is not None:
        offers.record_start_decision(connection, started.job_id, decision, at)
    connection.execute(
        "UPDATE jobs SET state = ?, end_reason = ?, updated_at = ? WHERE id = ?",
        (state, reason, at + HOUR, started.job_id),
    )
    return started.job_id
