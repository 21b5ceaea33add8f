"""Jobs in the books: one per validator and task, whatever is repeated."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from typing import Any

from core.tasks import TaskType
from core.wire import MinerSubmission
from miner.fleet.base import TaskKey
from miner.jobs.states import OPEN, EndReason, JobState
from miner.store.sql import insert, note

IS_OPEN = "state IN ({})".format(", ".join(f"'{state}'" for state in OPEN))

_UPDATE_JOB = """
UPDATE jobs SET task_type = :task_type, model = :model, expected_repo_name = :expected_repo_name,
    hours = :hours, started_at = :started_at, deadline_at = :deadline_at, request = :request,
    state = :state, end_reason = :end_reason, starts = starts + 1, lock_token = lock_token + 1,
    updated_at = :now
WHERE id = :id
"""
#: A new life of a job that had ended: what earlier attempts came to counts no more.
_REVIVE_JOB = """
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
SELECT_OPEN = f"SELECT validator, task_id, deadline_at FROM jobs WHERE {IS_OPEN}"  # noqa: S608 - our enum
_SELECT_SUBMISSION = (
    "SELECT submission_repo, submission_hash FROM jobs "
    "WHERE validator = ? AND task_id = ? AND submission_repo IS NOT NULL"
)


@dataclass(frozen=True, slots=True)
class Start:
    """A start request, whatever its kind, reduced to what the books keep."""

    task_id: str
    task_type: TaskType
    model: str
    hours: float
    expected_repo_name: str | None
    #: When the validator's clock started: a late request does not move its deadline.
    started_at: float
    request: bytes

    @property
    def deadline_at(self) -> float:
        return self.started_at + self.hours * 3600


@dataclass(frozen=True, slots=True)
class Started:
    job_id: int
    state: JobState
    repeated: bool
    end_reason: EndReason | None = None
    #: It asked for another type, model or other data than the job has, which keeps its own.
    differs: bool = False


def record_start(
    connection: sqlite3.Connection,
    validator: str,
    start: Start,
    now: float,
    *,
    hopeless: EndReason | None = None,
) -> Started:
    """Make the job, or bring a known one up to date: repository name and deadline of the newest start count.
    Its type, model and data count where they are the same, newly signed, or where the job had failed.

    `hopeless`: why the job can not be done at all. It is noted as failed at once, unless it goes on already.
    """
    job = connection.execute(
        "SELECT * FROM jobs WHERE validator = ? AND task_id = ?", (validator, start.task_id)
    ).fetchone()
    if job is None:
        started = _new_job(connection, validator, start, now, hopeless)
    else:
        started = _repeated_start(connection, job, start, now, hopeless)
    kind = "start_repeated" if started.repeated else "start"
    more = {"differs": True} if started.differs else {}
    note(connection, now, kind, start.task_id, state=started.state, repo=start.expected_repo_name, **more)
    if started.end_reason is not None and started.end_reason is hopeless:
        note(connection, now, "job_failed", start.task_id, reason=hopeless)
    return started


def submission(connection: sqlite3.Connection, key: TaskKey) -> MinerSubmission | None:
    row = connection.execute(_SELECT_SUBMISSION, key).fetchone()
    return MinerSubmission(repo=row[0], model_hash=row[1]) if row else None


def record_submission(
    connection: sqlite3.Connection, key: TaskKey, made: MinerSubmission, now: float
) -> bool:
    """Note what was published for a task; False when there is no such job."""
    cursor = connection.execute(
        "UPDATE jobs SET submission_repo = ?, submission_hash = ?, submitted_at = ?, updated_at = ?, "
        "lock_token = lock_token + 1 WHERE validator = ? AND task_id = ?",
        (made.repo, made.model_hash, now, now, *key),
    )
    if cursor.rowcount:
        note(connection, now, "submission", key.task_id, repo=made.repo, model_hash=made.model_hash)
    return bool(cursor.rowcount)


def fail_late(connection: sqlite3.Connection, now: float) -> list[TaskKey]:
    """End the jobs whose deadline has passed, well where something is published; the tasks that are free."""
    states = (JobState.FAILED, JobState.DONE, EndReason.DEADLINE, EndReason.PUBLISHED)
    rows = connection.execute(_FAIL_LATE_JOBS, (*states, now, now, now))
    return [TaskKey(*row) for row in rows.fetchall()]


def revive(connection: sqlite3.Connection, job_id: int, now: float) -> JobState:
    """Another try at a job that has ended."""
    connection.execute(_REVIVE_JOB, {"id": job_id, "state": JobState.QUEUED, "now": now})
    return JobState.QUEUED


def _new_job(
    connection: sqlite3.Connection, validator: str, start: Start, now: float, hopeless: EndReason | None
) -> Started:
    state = JobState.QUEUED if hopeless is None else JobState.FAILED
    job_id = insert(
        connection,
        "jobs",
        task_id=start.task_id,
        validator=validator,
        task_type=start.task_type,
        model=start.model,
        hours=start.hours,
        expected_repo_name=start.expected_repo_name,
        state=state,
        end_reason=hopeless,
        detail="",
        counted_from=0,
        ended_at=None if hopeless is None else now,
        started_at=start.started_at,
        deadline_at=start.deadline_at,
        starts=1,
        request=start.request,
        lock_token=1,
        updated_at=now,
    )
    return Started(job_id, state, repeated=False, end_reason=hopeless)


def _repeated_start(
    connection: sqlite3.Connection,
    job: sqlite3.Row,
    start: Start,
    now: float,
    hopeless: EndReason | None,
) -> Started:
    """The validator sends all its starts again when one miner's reply broke its loop (docs/protocol.md)."""
    state, reason = JobState(job["state"]), job["end_reason"]
    if state is JobState.FAILED and start.deadline_at > now:
        # It asks again and there is time again.
        if hopeless is None:
            state, reason = revive(connection, job["id"], now), None
        else:
            reason = hopeless
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
    return Started(job["id"], state, True, None if reason is None else EndReason(reason), differs)


def _differs(job: sqlite3.Row, start: Start) -> bool:
    """Whether the start is of another type or model, or has other data, than the job was made for."""
    known = (job["task_type"], job["model"], _data_of(job["request"]))
    return known != (start.task_type, start.model, _data_of(start.request))


def _data_of(request: bytes) -> list[Any]:
    """The data of a stored request. An address is signed anew for each start: its query is left out."""
    try:
        found = json.loads(request)
    except ValueError:
        return []
    if not isinstance(found, dict):
        return []
    addresses = [str(found.get(name)).partition("?")[0] for name in ("dataset", "dataset_zip")]
    return [*addresses, found.get("dataset_type"), found.get("model_type")]
