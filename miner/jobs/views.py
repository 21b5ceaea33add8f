"""Jobs, attempts, measurements and logs as the command line, the operator's port and the pages show them.

What a training writes is shown, never trusted.
"""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from core.domain.job_states import END_MEANINGS, EndReason
from core.domain.records import printable
from core.planning.time.calibration import expected_speed
from core.runs.run_files import RunResult
from miner.api.alerts import RuleAction
from miner.api.jobs import (
    AttemptDetails,
    AttemptFigures,
    EndText,
    JobDetails,
    JobFile,
    JobResult,
    JobSummary,
    LiveJob,
    LogChunk,
)
from miner.backends.run_folder import LOG_START, LogPosition, log_tail, read_log
from miner.fleet.costs import GpuCosts
from miner.fleet.fleet_file import NO_PRICES
from miner.jobs.figures import FiguresSnapshot, loss_line, read_figures, relative_gain
from miner.jobs.folder import AttemptFolder, JobFolder, job_folder
from miner.jobs.history import read_plan, read_result
from miner.jobs.tasks import request_for_display
from miner.store import attempts as store_attempts
from miner.store.actions import ActionRow, actions_of_job
from miner.store.attempts import AttemptRow, StoredFigures, attempts_of, figures_of
from miner.store.jobs import JobRow, NoSuchJob

_NO_COSTS = GpuCosts(NO_PRICES, {})
#: Progress bars overwrite their line.
_KEPT_CONTROLS = "\n\t\r"
#: Files that are listed of one job, and how deep.
MAX_FILES, MAX_DEPTH = 1000, 6
#: Shown parts of the job's directory; fetched inputs are not.
_SHOWN_FOLDERS = ("attempt_", "submission")


def job_summary(
    db: sqlite3.Connection, row: JobRow, live: LiveJob | None = None, costs: GpuCosts = _NO_COSTS
) -> JobSummary:
    """One job in a list."""
    return _job_summary(row, live, store_attempts.attempts_of(db, row.id), costs)


def _job_summary(
    row: JobRow, live: LiveJob | None, attempts: Sequence[AttemptRow], costs: GpuCosts
) -> JobSummary:
    times = [
        (attempt.gpus, max((attempt.ended_at or time.time()) - attempt.started_at, 0)) for attempt in attempts
    ]
    dollars = [costs.of(gpus, seconds) for gpus, seconds in times]
    return JobSummary(
        id=row.id,
        task_id=row.task_id,
        validator=row.validator,
        task_type=row.task_type,
        model=row.model,
        hours=row.hours,
        state=row.state,
        end_reason=row.end_reason,
        detail=row.detail,
        expected_repo_name=row.expected_repo_name,
        submission=row.submission,
        submitted_at=row.submitted_at,
        started_at=row.started_at,
        deadline_at=row.deadline_at,
        ended_at=row.ended_at,
        took_s=row.ended_at - row.started_at if row.ended_at else None,
        starts=row.starts,
        tags=row.tags,
        note=row.note,
        gpu_hours=sum(len(gpus) * seconds for gpus, seconds in times) / 3600,
        cost=None if None in dollars or not dollars else sum(filter(None, dollars)),
        result=training_result(attempts),
        live=replace(live) if live else None,  # its worker goes on changing it
    )


def idle_state(row: JobRow) -> LiveJob:
    """The display state of a job that no worker has."""
    return LiveJob(
        row.id,
        row.task_id,
        row.state.value,
        deadline_at=row.deadline_at,
        published=row.submission.repo if row.submission else None,
        trouble="" if row.end_reason is EndReason.PUBLISHED else row.detail,
    )


def job_details(
    db: sqlite3.Connection,
    row: JobRow,
    data_dir: Path,
    live: LiveJob | None = None,
    running: FiguresSnapshot | None = None,
    costs: GpuCosts = _NO_COSTS,
) -> JobDetails:
    """One job with everything that the store knows of it."""
    meaning = END_MEANINGS[row.end_reason] if row.end_reason else None
    attempts, stored = store_attempts.attempts_of(db, row.id), figures_of(db, row.id)
    return JobDetails(
        **dict(_job_summary(row, live, attempts, costs)),
        meaning=meaning and EndText(operator=meaning.operator, validator=meaning.validator),
        folder=str(job_folder(data_dir, row.id).path),
        request=dict(request_for_display(row.request)),
        attempts=[
            attempt_details(attempt, measured(attempt, stored.get(attempt.id), running))
            for attempt in attempts
        ],
        steps=store_attempts.steps_of(db, row.id),
        actions=RuleAction.of_each(actions_of_job(db, row.id)),
    )


def attempt_details(row: AttemptRow, stored: StoredFigures) -> AttemptDetails:
    snapshot = FiguresSnapshot.from_stored(stored)
    return AttemptDetails(
        number=row.number,
        backend=row.backend,
        key=row.key,
        gpus=list(row.gpus),
        folder=row.folder,
        started_at=row.started_at,
        end_by=row.end_by,
        ended_at=row.ended_at,
        end_reason=row.end_reason,
        meaning=END_MEANINGS[row.end_reason].operator if row.end_reason else None,
        detail=row.detail,
        result=training_result([row]),
        figures=snapshot.figures,
        target=snapshot.figures.target_text,
        losses=loss_line(snapshot.curves),
    )


def training_result(attempts: Sequence[AttemptRow]) -> JobResult | None:
    """The result of a training by its own word: the best of the attempts that left a model, otherwise the
    last that has one."""
    best: tuple[int, RunResult] | None = None
    for row in attempts:
        read = read_result(AttemptFolder(row.folder))
        if read is not None and (best is None or _is_better(read, best[1])):
            best = row.number, read
    if best is None:
        return None
    number, result = best
    return JobResult(
        attempt=number,
        end=result.end,
        metric=result.best.metric if result.best else None,
        base=result.base.value if result.base else None,
        best=result.best.value if result.best else None,
        best_step=result.best.step if result.best else None,
        gain=relative_gain(result.base, result.best),
        steps=result.steps,
        seconds=round(result.seconds, 1),
        tokens_s=result.tokens_s,
        memory_bytes=result.memory_bytes,
    )


def _is_better(new: RunResult, old: RunResult) -> bool:
    if new.submission is not old.submission:
        return new.submission
    return old.best is None or (new.best is not None and new.best.beats(old.best))


def select_attempt(attempts: Sequence[AttemptRow], number: int | None) -> AttemptRow:
    """The newest attempt, or the one with this number."""
    if not attempts:
        raise NoSuchJob("the job has not been launched yet: there is no log")
    selected = next((attempt for attempt in reversed(attempts) if number in (None, attempt.number)), None)
    if selected is None:
        raise NoSuchJob(f"the job has no attempt {number}; its attempts are 1 to {attempts[-1].number}")
    return selected


def read_log_chunk(row: AttemptRow, start: str, limit: int) -> LogChunk:
    """Read on from where an earlier chunk ended; "" starts at the beginning."""
    data, position = read_log(Path(row.folder), _position_of(start), limit)
    ended = row.ended_at is not None and len(data) < limit
    return LogChunk(
        attempt=row.number,
        text=printable(data.decode(errors="replace"), _KEPT_CONTROLS),
        next=_position_text(position),
        ended=ended,
    )


def last_log_lines(row: AttemptRow, lines: int) -> LogChunk:
    """The end of a log in whole lines, and where to continue from."""
    folder = Path(row.folder)
    _, position = read_log(folder, LOG_START, 0)
    kept = log_tail(folder, max(lines, 1) * 1000).splitlines(keepends=True)[-lines:] if lines else []
    size = _log_size(folder)
    return LogChunk(
        attempt=row.number,
        text=printable("".join(kept), _KEPT_CONTROLS),
        next=_position_text(LogPosition(position.inode, size)),
        ended=row.ended_at is not None,
    )


def _log_size(folder: Path) -> int:
    try:
        return (folder / "log").lstat().st_size
    except OSError:
        return 0


def _position_text(position: LogPosition) -> str:
    return f"{position.inode}.{position.offset}"


def _position_of(text: str) -> LogPosition:
    inode, _, offset = text.partition(".")
    return LogPosition(int(inode), int(offset)) if inode.isdecimal() and offset.isdecimal() else LOG_START


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
