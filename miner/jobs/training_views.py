"""Measurements, plan and files of attempts, as the operator's port and the commands show them.

All of it blocks on the disk: call it off the event loop.
"""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from core.domain.records import printable
from core.planning.time.calibration import expected_speed
from miner.api.alerts import RuleAction
from miner.api.jobs import AttemptFigures, JobFile
from miner.jobs.figures import FiguresSnapshot, read_figures
from miner.jobs.folder import AttemptFolder, JobFolder
from miner.jobs.history import read_plan, read_result
from miner.store.actions import ActionRow, actions_of_job
from miner.store.attempts import AttemptRow, attempts_of
from miner.store.figures import StoredFigures, figures_of
from miner.store.jobs import JobRow, NoSuchJob

#: Files that are listed of one job, and how deep.
MAX_FILES, MAX_DEPTH = 1000, 6
#: Shown parts of the job's directory; fetched inputs are not.
_SHOWN_FOLDERS = ("attempt_", "submission")


def measured(row: AttemptRow, stored: StoredFigures | None, running: FiguresSnapshot | None) -> StoredFigures:
    """Figures of one attempt: as stored at its end, as it runs, or else from its progress file."""
    if stored is not None:
        return stored
    if row.ended_at is None and running is not None:
        return running.to_stored()
    folder = AttemptFolder(row.folder)
    seconds = row.ended_at - row.started_at if row.ended_at else None
    return read_figures(folder).snapshot(seconds=seconds, result=read_result(folder)).to_stored()


def series_json(db: sqlite3.Connection, row: JobRow, running: FiguresSnapshot | None) -> str:
    """The curves of all attempts. They are stored as JSON and put into the answer as they are: it is polled
    every two seconds."""
    stored, actions = figures_of(db, row.id), actions_of_job(db, row.id)
    parts, metric = [], AttemptFigures()
    for attempt in attempts_of(db, row.id):
        of_attempt = measured(attempt, stored.get(attempt.id), running)
        figures = AttemptFigures.model_validate_json(of_attempt.figures)
        metric = figures if figures.metric is not None else metric
        parts.append(_attempt_json(attempt, figures, of_attempt.curves, actions))
    head = {"job_id": row.id, "metric": metric.metric, "lower_is_better": metric.lower_is_better}
    return f'{json.dumps(head)[:-1]}, "attempts": [{", ".join(parts)}]}}'


def _attempt_json(row: AttemptRow, figures: AttemptFigures, curves: str, actions: Sequence[ActionRow]) -> str:
    head = {
        "number": row.number,
        "backend": row.backend,
        "started_at": row.started_at,
        "ended_at": row.ended_at,
        "actions": [
            RuleAction.model_validate(action).model_dump(mode="json")
            for action in actions
            if action.attempt == row.number
        ],
    }
    return f'{json.dumps(head)[:-1]}, "figures": {figures.model_dump_json()}, {curves[1:]}'


def plan_json(
    db: sqlite3.Connection, row: JobRow, number: int | None, running: FiguresSnapshot | None
) -> str:
    """The plan of an attempt, by default of the newest, with what it expected beside what was measured."""
    attempts = [attempt for attempt in attempts_of(db, row.id) if number in (None, attempt.number)]
    plan = read_plan(AttemptFolder(attempts[-1].folder)) if attempts else None
    if plan is None:
        which = f"attempt {number} of job {row.id}" if number else f"job {row.id}"
        lacking = "a plan of another version" if attempts else "no plan yet"
        raise NoSuchJob(f"{which} has {lacking}; `god-miner jobs show {row.id}` says what it is doing")
    attempt = attempts[-1]
    stored = figures_of(db, row.id).get(attempt.id)
    figures = AttemptFigures.model_validate_json(measured(attempt, stored, running).figures)
    expected = expected_speed(plan)
    terms: dict[str, int] = {}
    for term in plan.memory.terms:
        terms[term.name] = terms.get(term.name, 0) + term.bytes
    page = {
        "attempt": attempt.number,
        "plan": plan.model_dump(mode="json"),
        "concessions": [str(concession) for concession in plan.concessions],
        "memory": {
            "estimate_bytes": plan.memory.total_bytes,
            "terms": terms,
            "measured_bytes": figures.memory_bytes,
        },
        "expected": expected._asdict() if expected else None,
    }
    return json.dumps(page)


def files_view(folder: JobFolder) -> list[JobFile]:
    """List the files of the attempts and the submission by name. Trainings can write there: no link is
    followed, and nothing but plain files is listed."""
    files: list[JobFile] = []
    for path, status in _files(folder.path) if folder.path.is_dir() else ():
        if len(files) == MAX_FILES:
            break
        files.append(JobFile(name=printable(path), bytes=status.st_size, at=status.st_mtime))
    return files


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    for path, folders, files, opened in os.fwalk(folder, follow_symlinks=False, onerror=None):
        inside = os.path.relpath(path, folder)
        parts = () if inside == "." else tuple(inside.split(os.sep))
        folders[:] = sorted(name for name in folders if len(parts) < MAX_DEPTH and (parts or _is_shown(name)))
        for name in sorted(name for name in files if parts and not name.startswith(".")):
            try:
                status = os.stat(name, dir_fd=opened, follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield os.path.join(*parts, name), status


def _is_shown(name: str) -> bool:
    return name.startswith(_SHOWN_FOLDERS)
