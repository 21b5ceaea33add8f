"""Figures and curves of attempts in the store."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from core.domain.job_states import JobState
from miner.api.jobs import AttemptFigures

#: The curves of an attempt whose own were pruned.
NO_CURVES = '{"steps": {"step": [], "t": [], "loss": []}, "evals": []}'


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
