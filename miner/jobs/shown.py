"""Jobs as the command line, the operator's port and pages show them."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.run_files import RunResult
from miner.jobs.folder import AttemptFolder, job_folder
from miner.jobs.live import Live
from miner.jobs.past import read_result
from miner.jobs.states import MEANING
from miner.jobs.tasks import shown_request
from miner.store import work
from miner.store.work import AttemptRow, JobRow, StepRow


def line(db: sqlite3.Connection, row: JobRow, live: Live | None = None) -> dict[str, Any]:
    """One job in a list."""
    return _line(row, live, work.attempts(db, row.id))


def _line(row: JobRow, live: Live | None, attempts: Sequence[AttemptRow]) -> dict[str, Any]:
    return {
        "id": row.id,
        "task_id": row.task_id,
        "validator": row.validator,
        "task_type": row.task_type.value,
        "model": row.model,
        "hours": row.hours,
        "state": row.state.value,
        "end_reason": row.end_reason.value if row.end_reason else None,
        "detail": row.detail,
        "expected_repo_name": row.expected_repo_name,
        "submission": row.submission.model_dump() if row.submission else None,
        "submitted_at": row.submitted_at,
        "started_at": row.started_at,
        "deadline_at": row.deadline_at,
        "ended_at": row.ended_at,
        "starts": row.starts,
        "result": result(attempts),
        "live": live.as_dict() if live else None,
    }


def whole(db: sqlite3.Connection, row: JobRow, data_dir: Path, live: Live | None = None) -> dict[str, Any]:
    """One job with all that the books know of it."""
    meaning = MEANING[row.end_reason] if row.end_reason else None
    attempts = work.attempts(db, row.id)
    return {
        **_line(row, live, attempts),
        "meaning": {"operator": meaning.operator, "validator": meaning.validator} if meaning else None,
        "folder": str(job_folder(data_dir, row.id).path),
        "request": shown_request(row.request),
        "attempts": [attempt(one) for one in attempts],
        "steps": [step(one) for one in work.steps(db, row.id)],
    }


def attempt(row: AttemptRow) -> dict[str, Any]:
    return {
        "number": row.number,
        "engine": row.engine,
        "key": row.key,
        "gpus": list(row.gpus),
        "folder": row.folder,
        "started_at": row.started_at,
        "end_by": row.end_by,
        "ended_at": row.ended_at,
        "end_reason": row.end_reason.value if row.end_reason else None,
        "meaning": MEANING[row.end_reason].operator if row.end_reason else None,
        "detail": row.detail,
        "result": result([row]),
    }


def result(attempts: Sequence[AttemptRow]) -> dict[str, Any] | None:
    """What a training has come to by its own word: the best of the attempts that left a model, else the last
    that said something."""
    best: tuple[int, RunResult] | None = None
    for row in attempts:
        found = read_result(AttemptFolder(Path(row.folder)))
        if found is not None and (best is None or _is_better(found, best[1])):
            best = row.number, found
    if best is None:
        return None
    number, told = best
    return {
        "attempt": number,
        "end": told.end.value,
        "metric": told.best.metric if told.best else None,
        "base": told.base.value if told.base else None,
        "best": told.best.value if told.best else None,
        "best_step": told.best.step if told.best else None,
        "steps": told.steps,
        "seconds": round(told.seconds, 1),
        "tokens_s": told.tokens_s,
        "memory_bytes": told.memory_bytes,
    }


def _is_better(new: RunResult, old: RunResult) -> bool:
    if new.submission is not old.submission:
        return new.submission
    return old.best is None or (new.best is not None and new.best.beats(old.best))


def step(row: StepRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "attempt": row.attempt,
        "began_at": row.began_at,
        "ended_at": row.ended_at,
        "outcome": row.outcome,
        "detail": row.detail,
    }
