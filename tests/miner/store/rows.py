"""Offers, starts and reservations to store, and plain queries to look at what is stored."""

from __future__ import annotations

import sqlite3
import time
from typing import Any

from core.domain.keys import GpuReservation, ReservationKind, TaskKey
from core.domain.tasks import TaskType
from miner.store.jobs import StartRequest
from miner.store.offers import ReservationRow
from miner.store.store import Store

KEY = TaskKey("v1", "t1")


def rows(store: Store, sql: str) -> list[dict[str, Any]]:
    def query(connection: sqlite3.Connection) -> list[dict[str, Any]]:
        return [dict(row) for row in connection.execute(sql)]

    return store.read_now(query)


def column(store: Store, sql: str) -> list[Any]:
    return [next(iter(row.values())) for row in rows(store, sql)]


def start_request(
    task_id: str = "t1", *, repo: str | None = "r1", at: float | None = None, hours: float = 2.0
) -> StartRequest:
    started_at = time.time() if at is None else at
    return StartRequest(task_id, TaskType.DPO, "a/b", hours, repo, started_at, b'{"raw": 1}')


def reservation(
    task_id: str = "t1", *, kind: ReservationKind = ReservationKind.OFFER, lapses_at: float = 60.0
) -> ReservationRow:
    hold = GpuReservation(TaskKey("v1", task_id), kind, ("g0", "g1"), 0.0, 7200.0, 0.5)
    return ReservationRow(hold, firm=True, lapses_at=lapses_at)
