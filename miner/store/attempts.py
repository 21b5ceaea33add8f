"""Attempts, steps and lessons in the store, and the states of jobs that workers set.

A worker reads its job, works without a lock, and writes with the lock token that it read. If the row was
changed since (a second start, a cancellation), the write raises `StaleJob` and the worker reads again.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from core.domain.errors import GodMinerError
from core.domain.job_states import FINAL_STATES, EndReason, JobState
from miner.api.jobs import AttemptFigures, JobStep
from miner.store.database import add_event, insert_row
from miner.store.jobs import JobRow, get_job, reopen_job

#: A detail may be a trainer's whole traceback.
_MAX_DETAIL_CHARS = 2000
#: The curves of an attempt whose own were pruned.
NO_CURVES = '{"steps": {"step": [], "t": [], "loss": []}, "evals": []}'


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


class StoredFigures(NamedTuple):
    """The JSON of `AttemptFigures`, and of its thinned curves."""

    figures: str
    curves: str


def save_figures(connection: sqlite3.Connection, attempt_id: int, stored: StoredFigures) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO attempt_figures (attempt_id, figures, curves) VALUES (?, ?, ?)",
        (attempt_id, *stored),
    )


def figures_of(connection: sqlite3.Connection, job_id: int) -> dict[int, StoredFigures]:
    """Return the figures of a job's attempts by their ids; an attempt that runs has none yet."""
    rows = connection.execute(
        "SELECT attempt_id, figures, curves FROM attempt_figures "
        "JOIN attempts ON attempts.id = attempt_id WHERE job_id = ?",
        (job_id,),
    )
    return {row[0]: StoredFigures(row[1], row[2] or NO_CURVES) for row in rows}


class EndedFigures(NamedTuple):
    """Figures of one attempt of a job that has ended."""

    job_id: int
    state: JobState
    ended_at: float
    figures: AttemptFigures


def figures_of_ended(connection: sqlite3.Connection, begins_at: float, ends_at: float) -> list[EndedFigures]:
    """Return the figures of every attempt of the jobs that ended in a time."""
    rows = connection.execute(
        "SELECT jobs.id, jobs.state, coalesce(jobs.ended_at, jobs.updated_at) AS ended, figures "
        "FROM attempt_figures JOIN attempts ON attempts.id = attempt_id "
        "JOIN jobs ON jobs.id = attempts.job_id WHERE ended >= ? AND ended < ?",
        (begins_at, ends_at),
    )
    return [
        EndedFigures(job_id, JobState(state), ended, AttemptFigures.model_validate_json(text))
        for job_id, state, ended, text in rows
    ]


def mean_utilization(
    connection: sqlite3.Connection, gpus: Sequence[str], began_at: float, ended_at: float
) -> float | None:
    """Return the mean utilization of these GPUs over that time, or None if it was not measured. From minutes,
    or from hours where the minutes are pruned."""
    marks = ", ".join("?" * len(gpus))
    query = (
        "SELECT sum(utilization * samples) / sum(samples) FROM gpu_rollups "  # noqa: S608 - question marks
        f"WHERE period = ? AND at BETWEEN ? AND ? AND gpu IN ({marks}) AND utilization IS NOT NULL"
    )
    for period in (60, 3600):
        # Of the first and the last period, which it shares, those that it had for more than half.
        times = (began_at - period / 2, ended_at - period / 2)
        row = connection.execute(query, (period, *times, *gpus)).fetchone()
        if row[0] is not None:
            return float(row[0])
    return None
