"""Jobs as pages for a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from core.units import show_bytes, show_seconds

Job = Mapping[str, Any]


def listed(jobs: Sequence[Job], now: float | None = None) -> Table:
    """One line each."""
    now = time.time() if now is None else now
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("id", "task", "type", "model", "state", "what", "time", "submission"):
        table.add_column(name, overflow="fold", justify="right" if name == "id" else "left")
    for job in jobs:
        cells = (
            str(job["id"]),
            job["task_id"][:13],
            job["task_type"].removesuffix("Task").removesuffix("Text"),
            job["model"],
            job["state"],
            going_on(job),
            time_left(job, now),
            job["submission"]["repo"] if job["submission"] else "",
        )
        table.add_row(*map(escape, cells))
    return table


def going_on(job: Job) -> str:
    """What is done at the moment, or why it ended."""
    live = job["live"]
    if live is None:
        return job["end_reason"] or ""
    if live["trouble"]:
        return str(live["trouble"])[:80]
    if live["step"] is not None:
        total = f"/{live['steps']:,}" if live["steps"] else ""
        loss = f", loss {live['loss']:.4g}" if live["loss"] is not None else ""
        return f"{live['stage']} {live['step']:,}{total}{loss}"
    if live["bytes_done"] is not None:
        total = f" of {show_bytes(live['bytes_total'])}" if live["bytes_total"] else ""
        return f"{live['stage']}: {show_bytes(live['bytes_done'])}{total}"
    return live["stage"] or ""


def time_left(job: Job, now: float) -> str:
    if job["ended_at"] is not None:
        return f"ended {when(job['ended_at'])}"
    left = job["deadline_at"] - now
    return f"{show_seconds(left)} left" if left > 0 else "past its deadline"


def pages(job: Job, now: float | None = None) -> Iterator[RenderableType]:
    """Everything of one job."""
    now = time.time() if now is None else now
    yield _facts(job, now)
    if job["attempts"]:
        yield ""
        yield _attempts(job["attempts"])
    if job["steps"]:
        yield ""
        yield _steps(job["steps"])


def _facts(job: Job, now: float) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _fact_rows(job, now):
        if value:
            table.add_row(name, escape(str(value)))
    return table


def _fact_rows(job: Job, now: float) -> Iterator[tuple[str, Any]]:
    yield "job", f"{job['id']}, task {job['task_id']} of {job['validator']}"
    yield "task", f"{job['task_type']} of {job['model']}, {job['hours']:g} h"
    yield "state", job["state"]
    yield "now", going_on(job) if job["live"] else ""
    if job["end_reason"]:
        yield "because", f"{job['end_reason']}: {job['detail']}" if job["detail"] else job["end_reason"]
    if job["meaning"]:
        yield "which means", job["meaning"]["operator"]
        yield "validators see", job["meaning"]["validator"]
    yield "started", when(job["started_at"]) + (f", {job['starts']} times" if job["starts"] > 1 else "")
    yield "deadline", f"{when(job['deadline_at'])} ({time_left(job, now)})"
    yield "wanted as", job["expected_repo_name"]
    if job["submission"]:
        published = f"{job['submission']['repo']} at {when(job['submitted_at'])}"
        yield "published", published
    yield "folder", job["folder"]


def _attempts(attempts: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("attempt", "engine", "GPUs", "began", "took", "ended", "because"):
        table.add_column(name, overflow="fold")
    for one in attempts:
        took = show_seconds(one["ended_at"] - one["started_at"]) if one["ended_at"] else ""
        cells = (
            str(one["number"]),
            one["engine"],
            ", ".join(one["gpus"]),
            when(one["started_at"]),
            took,
            one["end_reason"] or "running",
            one["detail"],
        )
        table.add_row(*map(escape, cells))
    return table


def _steps(steps: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("step", "attempt", "began", "took", "came to", "because"):
        table.add_column(name, overflow="fold")
    for one in steps:
        took = show_seconds(one["ended_at"] - one["began_at"]) if one["ended_at"] else ""
        cells = (
            one["name"],
            str(one["attempt"] or ""),
            when(one["began_at"]),
            took,
            one["outcome"] or "going on",
            one["detail"],
        )
        table.add_row(*map(escape, cells))
    return table


def when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%m-%d %H:%M:%S")
