"""Figures and curves of attempts in the store, and what is asked of them."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

#: Of an attempt whose curves were pruned.
NO_CURVES = '{"steps": {"step": [], "t": [], "loss": []}, "evals": []}'


class StoredFigures(NamedTuple):
    """JSON of `miner.jobs.figures.AttemptFigures`, and of its thinned curves."""

    figures: str
    curves: str


def save_figures(connection: sqlite3.Connection, attempt_id: int, stored: StoredFigures) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO attempt_figures (attempt_id, figures, curves) VALUES (?, ?, ?)",
        (attempt_id, *stored),
    )


def figures_of(connection: sqlite3.Connection, job_id: int) -> dict[int, StoredFigures]:
    """By the attempt's id; an attempt that runs has none yet."""
    rows = connection.execute(
        "SELECT attempt_id, figures, curves FROM attempt_figures "
        "JOIN attempts ON attempts.id = attempt_id WHERE job_id = ?",
        (job_id,),
    )
    return {row[0]: StoredFigures(row[1], row[2] or NO_CURVES) for row in rows}


def mean_utilization(
    connection: sqlite3.Connection, gpus: Sequence[str], began_at: float, ended_at: float
) -> float | None:
    """Of these GPUs over that time, from minutes, or from hours where the minutes are pruned. None: not
    measured."""
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
