"""Attempts, steps and lessons in the store, and the states of jobs that workers set.

A worker reads its job, works without a lock, and writes with the lock token that it read. If the row was
changed since (a second start, a cancellation), the write raises `StaleJob` and the worker reads again.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from core.domain.errors import GodMinerError
from core.domain.job_states import FINAL_STATES, EndReason, JobState
from miner.api.jobs import JobStep
from miner.store.database import add_event, insert_row
from miner.store.jobs import JobRow, get_job, reopen_job

#: A detail may be a trainer's whole traceback.
_MAX_DETAIL_CHARS = 2000


class StaleJob(GodMinerError):
    """The job was changed after this worker read it."""

    code = "stale_worker"


class NewAttempt(NamedTuple):
    """An attempt before it begins."""

    number: int
    backend: str
    key: str
    folder: str
    gpus: tuple[str, ...]
    end_by: float


@dataclass(frozen=True, slots=True)
class AttemptRow:
    id: int
    job_id: int
    number: int
    backend: str
    key: str
    ref: str | None
    folder: str
    gpus: tuple[str, ...]
    started_at: float
    end_by: float | None
    ended_at: float | None
    end_reason: EndReason | None
    detail: str


# Reading


def attempts_of(connection: sqlite3.Connection, job_id: int) -> list[AttemptRow]:
    rows = connection.execute("SELECT * FROM attempts WHERE job_id = ? ORDER BY number", (job_id,))
    return [_attempt_from(row) for row in rows]


def open_attempts(connection: sqlite3.Connection) -> list[AttemptRow]:
    """Return the attempts that have not ended, in any state of their job."""
    rows = connection.execute("SELECT * FROM attempts WHERE ended_at IS NULL ORDER BY id")
    return [_attempt_from(row) for row in rows]


def steps_of(connection: sqlite3.Connection, job_id: int) -> list[JobStep]:
    rows = connection.execute(
        "SELECT attempt, name, began_at, ended_at, outcome, detail FROM steps WHERE job_id = ? ORDER BY id",
        (job_id,),
    )
    return [JobStep(**row) for row in rows]


def failed_steps(connection: sqlite3.Connection, outcomes: Collection[str], since: float) -> tuple[int, str]:
    """Count the steps since a moment with one of these outcomes; return also the detail of one of them."""
    marks = ", ".join("?" * len(outcomes))
    query = f"SELECT count(*), max(detail) FROM steps WHERE began_at >= ? AND outcome IN ({marks})"  # noqa: S608
    count, detail = connection.execute(query, (since, *outcomes)).fetchone()
    return count, detail or ""


def get_lesson(connection: sqlite3.Connection, shape: str) -> str | None:
    row = connection.execute("SELECT learned FROM lessons WHERE shape = ?", (shape,)).fetchone()
    return row[0] if row else None


# Writing


def check_lock_token(connection: sqlite3.Connection, job_id: int, token: int) -> None:
    row = connection.execute("SELECT lock_token FROM jobs WHERE id = ?", (job_id,)).fetchone()
    if row is None or row[0] != token:
        raise _stale(job_id)


def set_job_state(
    connection: sqlite3.Connection,
    job_id: int,
    token: int,
    state: JobState,
    now: float,
    *,
    reason: EndReason | None = None,
    detail: str = "",
) -> JobRow:
    """Set the state of a job; return the row with its new token."""
    cursor = connection.execute(
        "UPDATE jobs SET state = ?, end_reason = ?, detail = ?, ended_at = ?, updated_at = ?, "
        "lock_token = lock_token + 1 WHERE id = ? AND lock_token = ?",
        (
            state,
            reason,
            detail[:_MAX_DETAIL_CHARS],
            now if state in FINAL_STATES else None,
            now,
            job_id,
            token,
        ),
    )
    if cursor.rowcount == 0:
        raise _stale(job_id)
    job = get_job(connection, job_id)
    more = {"reason": reason.value, "detail": detail} if reason else {}
    add_event(connection, now, f"job_{state}", job.task_id, job_id=job_id, **more)
    return job


def retry_job(connection: sqlite3.Connection, job_id: int, token: int, now: float) -> JobRow:
    """Queue a job that has ended once more; return the row with its new token."""
    check_lock_token(connection, job_id, token)
    reopen_job(connection, job_id, now)
    return get_job(connection, job_id)


def begin_attempt(
    connection: sqlite3.Connection,
    job_id: int,
    token: int,
    now: float,
    attempt: NewAttempt,
) -> JobRow:
    """Insert the attempt and set the state together: a job in training always has an attempt."""
    job = set_job_state(connection, job_id, token, JobState.TRAINING, now)
    values = {**attempt._asdict(), "gpus": json.dumps(attempt.gpus)}
    insert_row(connection, "attempts", job_id=job_id, started_at=now, **values)
    return job


def set_backend_ref(connection: sqlite3.Connection, attempt_id: int, ref: str) -> None:
    """Store a fact about the backend, even if the job was changed meanwhile."""
    connection.execute("UPDATE attempts SET backend_ref = ? WHERE id = ?", (ref, attempt_id))


def end_attempt(
    connection: sqlite3.Connection, attempt_id: int, now: float, reason: EndReason, detail: str
) -> None:
    """Store how an attempt ended; the first reason stands."""
    cursor = connection.execute(
        "UPDATE attempts SET ended_at = ?, end_reason = ?, detail = ? WHERE id = ? AND ended_at IS NULL",
        (now, reason, detail[:_MAX_DETAIL_CHARS], attempt_id),
    )
    if cursor.rowcount:
        row = connection.execute(
            "SELECT job_id, number, task_id FROM attempts JOIN jobs ON jobs.id = job_id "
            "WHERE attempts.id = ?",
            (attempt_id,),
        ).fetchone()
        data = {"job_id": row["job_id"], "attempt": row["number"], "reason": reason.value, "detail": detail}
        add_event(connection, now, "attempt_ended", row["task_id"], **data)


def mark_bad_submission(connection: sqlite3.Connection, job_id: int, number: int, detail: str) -> None:
    """Mark an attempt whose submission turned out to be invalid."""
    connection.execute(
        "UPDATE attempts SET end_reason = ?, detail = ? WHERE job_id = ? AND number = ?",
        (EndReason.BAD_SUBMISSION, detail[:_MAX_DETAIL_CHARS], job_id, number),
    )


def begin_step(
    connection: sqlite3.Connection, job_id: int, token: int, name: str, attempt: int | None, now: float
) -> int:
    """Insert a step; one of this name that never ended is marked as interrupted. Return its id."""
    check_lock_token(connection, job_id, token)
    connection.execute(
        "UPDATE steps SET ended_at = ?, outcome = 'interrupted' "
        "WHERE job_id = ? AND name = ? AND ended_at IS NULL",
        (now, job_id, name),
    )
    return insert_row(connection, "steps", job_id=job_id, attempt=attempt, name=name, began_at=now)


def end_step(connection: sqlite3.Connection, step_id: int, outcome: str, detail: str, now: float) -> None:
    connection.execute(
        "UPDATE steps SET ended_at = ?, outcome = ?, detail = ? WHERE id = ?",
        (now, outcome, detail[:_MAX_DETAIL_CHARS], step_id),
    )


def save_lesson(connection: sqlite3.Connection, shape: str, learned: str, now: float) -> None:
    connection.execute(
        "INSERT INTO lessons (shape, learned, updated_at) VALUES (?, ?, ?) "
        "ON CONFLICT (shape) DO UPDATE SET learned = excluded.learned, updated_at = excluded.updated_at",
        (shape, learned, now),
    )


def _stale(job_id: int) -> StaleJob:
    return StaleJob(f"job {job_id} was changed after this worker read it")


def _attempt_from(row: sqlite3.Row) -> AttemptRow:
    values = dict(row)
    ref, reason = values.pop("backend_ref"), values.pop("end_reason")
    return AttemptRow(
        **values
        | {
            "ref": ref,
            "gpus": tuple(json.loads(values["gpus"])),
            "end_reason": EndReason(reason) if reason else None,
        }
    )
