"""Stores with offers and jobs in them, written by the store's own functions."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from core.domain.decisions import Decision
from core.domain.job_states import EndReason, JobState
from core.domain.keys import GpuReservation, ReservationKind, TaskKey
from core.domain.wire import MinerTaskOffer
from miner.store import database, offers
from miner.store.jobs import StartRequest
from miner.store.offers import ReservationRow
from tests.miner.offers.builders import HOUR, NOON, decided

VALIDATOR = "5Validator"


@contextmanager
def store(folder: Path) -> Iterator[sqlite3.Connection]:
    with closing(database.connect(database.prepare_store(folder))) as connection:
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
        hold = GpuReservation(
            key, ReservationKind.OFFER, there.gpus, there.starts_at, there.ends_at, decision.priority
        )
        place = ReservationRow(hold, firm=True, lapses_at=at + 900)
    received = offers.ReceivedOffer(validator, asked, b"{}", at)
    offers.record_offer(connection, received, decision, place, offers.StandingRule(False, 0))
    return decision


def lapse(connection: sqlite3.Connection, task_id: str, validator: str = VALIDATOR) -> None:
    offers.lapse_reservations(connection, [TaskKey(validator, task_id)], NOON)


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
    start = StartRequest(
        asked.task_id, asked.task_type, asked.model, asked.hours_to_complete, "repo", at, raw
    )
    started = offers.record_offered_start(
        connection, validator, start, None, now=at, decision=decision, infeasible=None
    )
    connection.execute(
        "UPDATE jobs SET state = ?, end_reason = ?, updated_at = ? WHERE id = ?",
        (state, reason, at + HOUR, started.job_id),
    )
    return started.job_id
