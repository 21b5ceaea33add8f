"""The workers' side of the books: what is being done on a job, attempt by attempt, step by step.

Load, process, apply: a worker reads its job, works without any lock, and writes with the token that it read.
A row that somebody else has changed since (a second start, a cancellation) does not take the write: `Stale`,
and the worker looks again.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass

from core.errors import GodMinerError
from core.tasks import TaskType
from core.wire import MinerSubmission
from miner.jobs.states import OVER, EndReason, JobState
from miner.store.jobs import IS_OPEN
from miner.store.sql import insert, note

_RENAMED = (
    "state = 'done' AND expected_repo_name IS NOT NULL AND submission_repo IS NOT NULL "
    "AND deadline_at > ? AND substr(submission_repo, -length(expected_repo_name) - 1) "
    "<> '/' || expected_repo_name"
)


class Stale(GodMinerError):
    """The job was changed by somebody else since this worker has read it."""

    code = "stale_worker"


class NoSuchJob(GodMinerError):
    code = "no_such_job"


@dataclass(frozen=True, slots=True)
class JobRow:
    id: int
    task_id: str
    validator: str
    task_type: TaskType
    model: str
    hours: float
    expected_repo_name: str | None
    state: JobState
    end_reason: EndReason | None
    detail: str
    counted_from: int
    ended_at: float | None
    started_at: float
    deadline_at: float
    starts: int
    request: bytes
    submission: MinerSubmission | None
    submitted_at: float | None
    lock_token: int
    updated_at: float

    @property
    def misnamed(self) -> bool:
        """What is published has another name than the newest start wants."""
        if self.submission is None or self.expected_repo_name is None:
            return False
        return self.submission.repo.rsplit("/", 1)[-1] != self.expected_repo_name


@dataclass(frozen=True, slots=True)
class AttemptRow:
    id: int
    job_id: int
    number: int
    engine: str
    key: str
    ref: str | None
    folder: str
    gpus: tuple[str, ...]
    started_at: float
    end_by: float | None
    ended_at: float | None
    end_reason: EndReason | None
    detail: str


@dataclass(frozen=True, slots=True)
class StepRow:
    id: int
    attempt: int | None
    name: str
    began_at: float
    ended_at: float | None
    outcome: str | None
    detail: str


# Reading


def job(connection: sqlite3.Connection, job_id: int) -> JobRow:
    row = connection.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
    if row is None:
        raise NoSuchJob(f"there is no job {job_id}; `god-miner jobs list` shows those there are")
    return _job(row)


def open_jobs(connection: sqlite3.Connection, now: float) -> list[JobRow]:
    """Every job that needs a worker: those that are not over, and those published under an old name."""
    query = f"SELECT * FROM jobs WHERE {IS_OPEN} OR ({_RENAMED}) ORDER BY id"  # noqa: S608 - our own text
    return [_job(row) for row in connection.execute(query, (now,))]


def newest_jobs(connection: sqlite3.Connection, limit: int, *, only_open: bool = False) -> list[JobRow]:
    """Newest first."""
    condition = IS_OPEN if only_open else "1"
    query = f"SELECT * FROM jobs WHERE {condition} ORDER BY id DESC LIMIT ?"  # noqa: S608 - our own text
    return [_job(row) for row in connection.execute(query, (limit,))]


def find_job(connection: sqlite3.Connection, word: str) -> JobRow:
    """By number, by the task's id, or by the beginning of it where that is enough."""
    if word.isdecimal() and len(word) < 19:
        row = connection.execute("SELECT * FROM jobs WHERE id = ?", (int(word),)).fetchone()
        if row is not None:
            return _job(row)
    exact = connection.execute("SELECT * FROM jobs WHERE task_id = ? ORDER BY id DESC", (word,)).fetchall()
    if len(exact) == 1:
        return _job(exact[0])
    if exact:
        numbers = ", ".join(str(row["id"]) for row in exact)
        raise NoSuchJob(f"several validators have a task {word!r}; which of the jobs {numbers} is meant?")
    found = connection.execute(
        "SELECT * FROM jobs WHERE substr(task_id, 1, ?) = ? LIMIT 2", (len(word), word)
    ).fetchall()
    if len(found) != 1 or not word:
        several = "several tasks begin with" if found and word else "there is no job"
        raise NoSuchJob(f"{several} {word!r}; `god-miner jobs list` shows those there are")
    return _job(found[0])


def has_repo_of_another(connection: sqlite3.Connection, validator: str, name: str) -> bool:
    """Whether a repository of that name holds what was published for another validator's task."""
    query = (
        "SELECT 1 FROM jobs WHERE validator <> ? AND submission_repo IS NOT NULL "
        "AND substr(submission_repo, -length(?) - 1) = '/' || ? LIMIT 1"
    )
    return connection.execute(query, (validator, name, name)).fetchone() is not None


def finished_before(connection: sqlite3.Connection, moment: float) -> list[int]:
    """Jobs that were over by then."""
    query = f"SELECT id FROM jobs WHERE NOT {IS_OPEN} AND coalesce(ended_at, updated_at) <= ?"  # noqa: S608 - our own text
    return [row[0] for row in connection.execute(query, (moment,))]


def attempts(connection: sqlite3.Connection, job_id: int) -> list[AttemptRow]:
    rows = connection.execute("SELECT * FROM attempts WHERE job_id = ? ORDER BY number", (job_id,))
    return [_attempt(row) for row in rows]


def open_attempts(connection: sqlite3.Connection) -> list[AttemptRow]:
    """Attempts without an end, whatever their job says."""
    rows = connection.execute("SELECT * FROM attempts WHERE ended_at IS NULL ORDER BY id")
    return [_attempt(row) for row in rows]


def steps(connection: sqlite3.Connection, job_id: int) -> list[StepRow]:
    rows = connection.execute("SELECT * FROM steps WHERE job_id = ? ORDER BY id", (job_id,))
    return [
        StepRow(
            row["id"],
            row["attempt"],
            row["name"],
            row["began_at"],
            row["ended_at"],
            row["outcome"],
            row["detail"],
        )
        for row in rows
    ]


def lesson(connection: sqlite3.Connection, shape: str) -> str | None:
    row = connection.execute("SELECT learned FROM lessons WHERE shape = ?", (shape,)).fetchone()
    return row[0] if row else None


# Writing


def guard(connection: sqlite3.Connection, job_id: int, token: int) -> None:
    row = connection.execute("SELECT lock_token FROM jobs WHERE id = ?", (job_id,)).fetchone()
    if row is None or row[0] != token:
        raise Stale(f"job {job_id} was changed since this worker has read it")


def move(
    connection: sqlite3.Connection,
    job_id: int,
    token: int,
    state: JobState,
    now: float,
    *,
    reason: EndReason | None = None,
    detail: str = "",
) -> JobRow:
    """Bring a job to a state. The row with its new token."""
    over = state in OVER
    cursor = connection.execute(
        "UPDATE jobs SET state = ?, end_reason = ?, detail = ?, ended_at = ?, updated_at = ?, "
        "lock_token = lock_token + 1 WHERE id = ? AND lock_token = ?",
        (state, reason, detail, now if over else None, now, job_id, token),
    )
    if cursor.rowcount == 0:
        raise Stale(f"job {job_id} was changed since this worker has read it")
    moved = job(connection, job_id)
    more = {"reason": reason.value, "detail": detail} if reason else {}
    note(connection, now, f"job_{state}", moved.task_id, job_id=job_id, **more)
    return moved


def begin_attempt(
    connection: sqlite3.Connection,
    job_id: int,
    token: int,
    now: float,
    *,
    engine: str,
    key: str,
    folder: str,
    number: int,
    gpus: tuple[str, ...],
    end_by: float,
) -> JobRow:
    """The attempt and the state in one: a job in training always has one to look at."""
    moved = move(connection, job_id, token, JobState.TRAINING, now)
    insert(
        connection,
        "attempts",
        job_id=job_id,
        number=number,
        engine=engine,
        key=key,
        folder=folder,
        gpus=json.dumps(gpus),
        started_at=now,
        end_by=end_by,
        detail="",
    )
    return moved


def set_ref(connection: sqlite3.Connection, attempt_id: int, ref: str) -> None:
    """A fact about the engine: kept whoever has changed the job meanwhile."""
    connection.execute("UPDATE attempts SET engine_ref = ? WHERE id = ?", (ref, attempt_id))


def end_attempt(
    connection: sqlite3.Connection, attempt_id: int, now: float, reason: EndReason, detail: str
) -> None:
    """The first word on how it ended stands."""
    cursor = connection.execute(
        "UPDATE attempts SET ended_at = ?, end_reason = ?, detail = ? WHERE id = ? AND ended_at IS NULL",
        (now, reason, detail, attempt_id),
    )
    if cursor.rowcount:
        row = connection.execute(
            "SELECT job_id, number, task_id FROM attempts JOIN jobs ON jobs.id = job_id "
            "WHERE attempts.id = ?",
            (attempt_id,),
        ).fetchone()
        more = {"job_id": row["job_id"], "attempt": row["number"], "reason": reason.value, "detail": detail}
        note(connection, now, "attempt_ended", row["task_id"], **more)


def refuse(connection: sqlite3.Connection, job_id: int, number: int, detail: str) -> None:
    """What an attempt left is no valid submission after all."""
    connection.execute(
        "UPDATE attempts SET end_reason = ?, detail = ? WHERE job_id = ? AND number = ?",
        (EndReason.BAD_SUBMISSION, detail, job_id, number),
    )


def begin_step(
    connection: sqlite3.Connection, job_id: int, token: int, name: str, attempt: int | None, now: float
) -> int:
    guard(connection, job_id, token)
    connection.execute(
        "UPDATE steps SET ended_at = ?, outcome = 'interrupted' "
        "WHERE job_id = ? AND name = ? AND ended_at IS NULL",
        (now, job_id, name),
    )
    return insert(connection, "steps", job_id=job_id, attempt=attempt, name=name, began_at=now, detail="")


def end_step(connection: sqlite3.Connection, step_id: int, outcome: str, detail: str, now: float) -> None:
    connection.execute(
        "UPDATE steps SET ended_at = ?, outcome = ?, detail = ? WHERE id = ?", (now, outcome, detail, step_id)
    )


def keep_lesson(connection: sqlite3.Connection, shape: str, learned: str, now: float) -> None:
    connection.execute(
        "INSERT INTO lessons (shape, learned, updated_at) VALUES (?, ?, ?) "
        "ON CONFLICT (shape) DO UPDATE SET learned = excluded.learned, updated_at = excluded.updated_at",
        (shape, learned, now),
    )


def _job(row: sqlite3.Row) -> JobRow:
    repo = row["submission_repo"]
    reason = row["end_reason"]
    return JobRow(
        id=row["id"],
        task_id=row["task_id"],
        validator=row["validator"],
        task_type=TaskType(row["task_type"]),
        model=row["model"],
        hours=row["hours"],
        expected_repo_name=row["expected_repo_name"],
        state=JobState(row["state"]),
        end_reason=EndReason(reason) if reason else None,
        detail=row["detail"],
        counted_from=row["counted_from"],
        ended_at=row["ended_at"],
        started_at=row["started_at"],
        deadline_at=row["deadline_at"],
        starts=row["starts"],
        request=row["request"],
        submission=MinerSubmission(repo=repo, model_hash=row["submission_hash"]) if repo else None,
        submitted_at=row["submitted_at"],
        lock_token=row["lock_token"],
        updated_at=row["updated_at"],
    )


def _attempt(row: sqlite3.Row) -> AttemptRow:
    reason = row["end_reason"]
    return AttemptRow(
        id=row["id"],
        job_id=row["job_id"],
        number=row["number"],
        engine=row["engine"],
        key=row["key"],
        ref=row["engine_ref"],
        folder=row["folder"],
        gpus=tuple(json.loads(row["gpus"])),
        started_at=row["started_at"],
        end_by=row["end_by"],
        ended_at=row["ended_at"],
        end_reason=EndReason(reason) if reason else None,
        detail=row["detail"],
    )
