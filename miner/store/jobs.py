"""Starts and jobs in the store: one job per validator and task, however often a start is repeated."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from core.domain.errors import GodMinerError
from core.domain.job_states import OPEN_STATES, EndReason, JobState
from core.domain.keys import TaskKey
from core.domain.tasks import TaskType
from core.domain.wire import MinerSubmission
from miner.store.database import add_event, insert_row

IS_OPEN = "state IN ({})".format(", ".join(f"'{state}'" for state in OPEN_STATES))

_UPDATE_JOB = """
UPDATE jobs SET task_type = :task_type, model = :model, expected_repo_name = :expected_repo_name,
    hours = :hours, started_at = :started_at, deadline_at = :deadline_at, request = :request,
    state = :state, end_reason = :end_reason, starts = starts + 1, lock_token = lock_token + 1,
    updated_at = :now
WHERE id = :id
"""
#: Of a reopened job, the earlier attempts count no more.
_REOPEN_JOB = """
UPDATE jobs SET state = :state, end_reason = NULL, detail = '', ended_at = NULL, updated_at = :now,
    counted_from = (SELECT coalesce(max(number), 0) FROM attempts WHERE job_id = :id),
    lock_token = lock_token + 1
WHERE id = :id
"""
_FAIL_LATE_JOBS = (
    "UPDATE jobs SET state = iif(submission_repo IS NULL, ?, ?), "  # noqa: S608 - our enum
    "end_reason = iif(submission_repo IS NULL, ?, ?), "
    "updated_at = ?, ended_at = ?, lock_token = lock_token + 1 "
    f"WHERE {IS_OPEN} AND deadline_at <= ? RETURNING validator, task_id"
)
_SELECT_SUBMISSION = (
    "SELECT submission_repo, submission_hash FROM jobs "
    "WHERE validator = ? AND task_id = ? AND submission_repo IS NOT NULL"
)
_PUBLISHED_UNDER_OLD_NAME = (
    "state = 'done' AND expected_repo_name IS NOT NULL AND submission_repo IS NOT NULL "
    "AND deadline_at > ? AND substr(submission_repo, -length(expected_repo_name) - 1) "
    "<> '/' || expected_repo_name"
)


class NoSuchJob(GodMinerError):
    code = "no_such_job"


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A start request of any kind, reduced to what is stored."""

    task_id: str
    task_type: TaskType
    model: str
    hours: float
    expected_repo_name: str | None
    #: When the validator's clock started: a late request does not move its deadline.
    started_at: float
    request: bytes
    tags: tuple[str, ...] = ()
    note: str = ""

    @property
    def deadline_at(self) -> float:
        return self.started_at + self.hours * 3600


@dataclass(frozen=True, slots=True)
class RecordedStart:
    job_id: int
    state: JobState
    repeated: bool
    end_reason: EndReason | None = None
    #: The start names another type, model or data than the job has; the job keeps its own.
    differs: bool = False


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
    #: By the operator.
    tags: tuple[str, ...] = ()
    note: str = ""

    @property
    def misnamed(self) -> bool:
        """True if the published repository has another name than the newest start wants."""
        if self.submission is None or self.expected_repo_name is None:
            return False
        return self.submission.repo.rsplit("/", 1)[-1] != self.expected_repo_name


# Starts and submissions


def record_start(
    connection: sqlite3.Connection,
    validator: str,
    start: StartRequest,
    now: float,
    *,
    infeasible: EndReason | None = None,
) -> RecordedStart:
    """Create the job, or update a known one.

    Repository name and deadline of the newest start count; its type, model and data only where they are the
    same, newly signed, or where the job had failed.

    `infeasible`: why the job cannot be done at all. It is failed at once, unless it is already running.
    """
    job = connection.execute(
        "SELECT * FROM jobs WHERE validator = ? AND task_id = ?", (validator, start.task_id)
    ).fetchone()
    if job is None:
        recorded = _new_job(connection, validator, start, now, infeasible)
    else:
        recorded = _repeated_start(connection, job, start, now, infeasible)
    kind = "start_repeated" if recorded.repeated else "start"
    more = {"differs": True} if recorded.differs else {}
    add_event(
        connection, now, kind, start.task_id, state=recorded.state, repo=start.expected_repo_name, **more
    )
    if recorded.end_reason is not None and recorded.end_reason is infeasible:
        add_event(connection, now, "job_failed", start.task_id, reason=infeasible)
    return recorded


def get_submission(connection: sqlite3.Connection, key: TaskKey) -> MinerSubmission | None:
    row = connection.execute(_SELECT_SUBMISSION, key).fetchone()
    return MinerSubmission(repo=row[0], model_hash=row[1]) if row else None


def record_submission(
    connection: sqlite3.Connection, key: TaskKey, submission: MinerSubmission, now: float
) -> bool:
    """Store what was published for a task; False if there is no such job."""
    cursor = connection.execute(
        "UPDATE jobs SET submission_repo = ?, submission_hash = ?, submitted_at = ?, updated_at = ?, "
        "lock_token = lock_token + 1 WHERE validator = ? AND task_id = ?",
        (submission.repo, submission.model_hash, now, now, *key),
    )
    if cursor.rowcount:
        data = {"repo": submission.repo, "model_hash": submission.model_hash}
        add_event(connection, now, "submission", key.task_id, **data)
    return bool(cursor.rowcount)


def fail_late_jobs(connection: sqlite3.Connection, now: float) -> list[TaskKey]:
    """End the jobs whose deadline has passed, as done where something is published; return their keys."""
    states = (JobState.FAILED, JobState.DONE, EndReason.DEADLINE, EndReason.PUBLISHED)
    rows = connection.execute(_FAIL_LATE_JOBS, (*states, now, now, now)).fetchall()
    late = [TaskKey(*row) for row in rows]
    for key in late:
        add_event(connection, now, "job_failed", key.task_id, reason=EndReason.DEADLINE)
    return late


def label_job(connection: sqlite3.Connection, job_id: int, tags: Iterable[str], note: str) -> None:
    """Replace the tags and the note. The lock token stays: no worker reads them."""
    values = (json.dumps(sorted(set(tags))), note, job_id)
    connection.execute("UPDATE jobs SET tags = ?, note = ? WHERE id = ?", values)


def reopen_job(connection: sqlite3.Connection, job_id: int, now: float) -> JobState:
    """Queue a job that has ended once more."""
    connection.execute(_REOPEN_JOB, {"id": job_id, "state": JobState.QUEUED, "now": now})
    return JobState.QUEUED


def _new_job(
    connection: sqlite3.Connection,
    validator: str,
    start: StartRequest,
    now: float,
    infeasible: EndReason | None,
) -> RecordedStart:
    state = JobState.QUEUED if infeasible is None else JobState.FAILED
    job_id = insert_row(
        connection,
        "jobs",
        task_id=start.task_id,
        validator=validator,
        task_type=start.task_type,
        model=start.model,
        hours=start.hours,
        expected_repo_name=start.expected_repo_name,
        state=state,
        end_reason=infeasible,
        ended_at=None if infeasible is None else now,
        started_at=start.started_at,
        deadline_at=start.deadline_at,
        starts=1,
        request=start.request,
        tags=json.dumps(sorted(set(start.tags))),
        note=start.note,
        lock_token=1,
        updated_at=now,
    )
    return RecordedStart(job_id, state, repeated=False, end_reason=infeasible)


def _repeated_start(
    connection: sqlite3.Connection,
    job: sqlite3.Row,
    start: StartRequest,
    now: float,
    infeasible: EndReason | None,
) -> RecordedStart:
    """The validator sends all its starts again when one miner's reply broke its loop (docs/protocol.md)."""
    state, reason = JobState(job["state"]), job["end_reason"]
    if state is JobState.FAILED and start.deadline_at > now:  # the task has time again
        if infeasible is None:
            state, reason = reopen_job(connection, job["id"], now), None
        else:
            reason = infeasible
    differs = JobState(job["state"]) is not JobState.FAILED and _differs(job, start)
    changed = {
        "id": job["id"],
        "task_type": job["task_type"] if differs else start.task_type,
        "model": job["model"] if differs else start.model,
        "expected_repo_name": start.expected_repo_name,
        "hours": start.hours,
        "started_at": start.started_at,
        "deadline_at": start.deadline_at,
        "request": job["request"] if differs else start.request,
        "state": state,
        "end_reason": reason,
        "now": now,
    }
    connection.execute(_UPDATE_JOB, changed)
    return RecordedStart(job["id"], state, True, None if reason is None else EndReason(reason), differs)


def _differs(job: sqlite3.Row, start: StartRequest) -> bool:
    """Return True if the start has another type, model or data than the job."""
    known = (job["task_type"], job["model"], _data_of(job["request"]))
    return known != (start.task_type, start.model, _data_of(start.request))


def _data_of(request: bytes) -> list[Any]:
    """The data of a stored request. Addresses are signed again for each start: the query is left out."""
    try:
        fields = json.loads(request)
    except ValueError:
        return []
    if not isinstance(fields, dict):
        return []
    addresses = [str(fields.get(name)).partition("?")[0] for name in ("dataset", "dataset_zip")]
    return [*addresses, fields.get("dataset_type"), fields.get("model_type")]


# Reading


def get_job(connection: sqlite3.Connection, job_id: int) -> JobRow:
    row = connection.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
    if row is None:
        raise NoSuchJob(f"there is no job {job_id}; `god-miner jobs list` shows the jobs there are")
    return _job_from(row)


def open_jobs(connection: sqlite3.Connection, now: float) -> list[JobRow]:
    """Return every job that needs a worker: those not over, and those published under an old name."""
    query = f"SELECT * FROM jobs WHERE {IS_OPEN} OR ({_PUBLISHED_UNDER_OLD_NAME}) ORDER BY id"  # noqa: S608 - our own text
    return [_job_from(row) for row in connection.execute(query, (now,))]


class JobFilter(NamedTuple):
    """The jobs that are wanted."""

    only_open: bool = False
    state: JobState | None = None
    #: A part of the model's name, the task's id or the note.
    text: str = ""
    tag: str = ""

    def terms(self) -> tuple[list[str], list[Any]]:
        """SQL terms that hold for them all, and their values."""
        terms, values = [IS_OPEN if self.only_open else "1"], list[Any]()
        if self.state is not None:
            terms.append("state = ?")
            values.append(self.state)
        if self.text:
            columns = ("model", "task_id", "note")
            terms.append(f"({' OR '.join(f'instr(lower({column}), lower(?))' for column in columns)})")
            values += [self.text] * len(columns)
        if self.tag:
            terms.append("EXISTS (SELECT 1 FROM json_each(tags) WHERE value = ?)")
            values.append(self.tag)
        return terms, values


ALL_JOBS, OPEN_JOBS = JobFilter(), JobFilter(only_open=True)


def newest_jobs(
    connection: sqlite3.Connection, limit: int, wanted: JobFilter = ALL_JOBS, before: int | None = None
) -> list[JobRow]:
    """Return jobs, newest first. `before`: only those with a lower number."""
    terms, values = wanted.terms()
    if before is not None:
        terms.append("id < ?")
        values.append(before)
    query = f"SELECT * FROM jobs WHERE {' AND '.join(terms)} ORDER BY id DESC LIMIT ?"  # noqa: S608 - ours
    return [_job_from(row) for row in connection.execute(query, (*values, limit))]


def newest_ended_jobs(connection: sqlite3.Connection, limit: int) -> list[JobRow]:
    """Return the newest jobs that are over."""
    query = f"SELECT * FROM jobs WHERE NOT {IS_OPEN} ORDER BY id DESC LIMIT ?"  # noqa: S608 - ours
    return [_job_from(row) for row in connection.execute(query, (limit,))]


def find_job(connection: sqlite3.Connection, name: str) -> JobRow:
    """Return the job with this number, this task id, or the only one whose task id begins like this."""
    if name.isdecimal() and len(name) < 19:
        row = connection.execute("SELECT * FROM jobs WHERE id = ?", (int(name),)).fetchone()
        if row is not None:
            return _job_from(row)
    rows = connection.execute("SELECT * FROM jobs WHERE task_id = ? ORDER BY id DESC", (name,)).fetchall()
    if len(rows) > 1:
        numbers = ", ".join(str(row["id"]) for row in rows)
        raise NoSuchJob(f"several validators have a task {name!r}; which of the jobs {numbers} is meant?")
    if not rows and name:
        rows = connection.execute(
            "SELECT * FROM jobs WHERE substr(task_id, 1, ?) = ? LIMIT 2", (len(name), name)
        ).fetchall()
    if len(rows) != 1:
        problem = "several tasks begin with" if rows else "there is no job"
        raise NoSuchJob(f"{problem} {name!r}; `god-miner jobs list` shows the jobs there are")
    return _job_from(rows[0])


def has_repo_of_another(connection: sqlite3.Connection, validator: str, name: str) -> bool:
    """Return True if a repository of that name has the model of another validator's task."""
    query = (
        "SELECT 1 FROM jobs WHERE validator <> ? AND submission_repo IS NOT NULL "
        "AND substr(submission_repo, -length(?) - 1) = '/' || ? LIMIT 1"
    )
    return connection.execute(query, (validator, name, name)).fetchone() is not None


def count_by_state(connection: sqlite3.Connection, ended_since: float | None = None) -> dict[str, int]:
    """Count jobs by state: all, or those that have ended since a moment."""
    condition, values = ("1", ()) if ended_since is None else ("ended_at >= ?", (ended_since,))
    query = f"SELECT state, count(*) FROM jobs WHERE {condition} GROUP BY state"  # noqa: S608 - ours
    return dict(connection.execute(query, values).fetchall())


def count_ends(connection: sqlite3.Connection, since: float) -> Counter[tuple[JobState, str | None]]:
    """Count the jobs that have ended since a moment, by state and reason."""
    rows = connection.execute("SELECT state, end_reason FROM jobs WHERE ended_at >= ?", (since,))
    return Counter((JobState(state), reason) for state, reason in rows)


def count_published(connection: sqlite3.Connection, before: float) -> int:
    query = "SELECT count(*) FROM jobs WHERE state = ? AND coalesce(ended_at, updated_at) < ?"
    return int(connection.execute(query, (JobState.DONE, before)).fetchone()[0])


def first_start(connection: sqlite3.Connection) -> float | None:
    """Return the time of the first start, or None if there was none."""
    started_at: float | None = connection.execute("SELECT min(started_at) FROM jobs").fetchone()[0]
    return started_at


def jobs_finished_before(connection: sqlite3.Connection, moment: float) -> list[int]:
    """Return the ids of the jobs that were over by then."""
    query = f"SELECT id FROM jobs WHERE NOT {IS_OPEN} AND coalesce(ended_at, updated_at) <= ?"  # noqa: S608 - our own text
    return [row[0] for row in connection.execute(query, (moment,))]


def _job_from(row: sqlite3.Row) -> JobRow:
    values = dict(row)
    repo, model_hash = values.pop("submission_repo"), values.pop("submission_hash")
    reason = values.pop("end_reason")
    return JobRow(
        **values
        | {
            "task_type": TaskType(values["task_type"]),
            "state": JobState(values["state"]),
            "tags": tuple(json.loads(values["tags"])),
            "end_reason": EndReason(reason) if reason else None,
            "submission": MinerSubmission(repo=repo, model_hash=model_hash) if repo else None,
        }
    )
