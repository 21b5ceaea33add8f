"""Jobs as pages for a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from core.units import show_bytes, show_seconds

Job = Mapping[str, Any]

#: Beyond this many columns a list has room for what can be looked up.
WIDE = 120


def one_line_table(*columns: str, cut: Sequence[str], right: Sequence[str] = ()) -> Table:
    """A line for each row however narrow the terminal: the columns in `cut` give way, the others do not."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(
            name,
            no_wrap=name not in cut,
            overflow="ellipsis",
            justify="right" if name in right else "left",
        )
    return table


def cells(*values: str) -> tuple[Text, ...]:
    return tuple(Text(" ".join(value.split()), no_wrap=True, overflow="ellipsis") for value in values)


def listed(jobs: Sequence[Job], width: int, now: float | None = None) -> Table:
    """One line each."""
    now = time.time() if now is None else now
    names = ["id", "type", "model", "state", "what", "score", "time"]
    names += ["task", "submission"] if width >= WIDE else []
    table = one_line_table(*names, cut=("model", "what", "submission"), right=("id",))
    for job in jobs:
        row = {
            "id": str(job["id"]),
            "type": job["task_type"].removesuffix("Task").removesuffix("Text"),
            "model": job["model"],
            "state": job["state"],
            "what": going_on(job),
            "score": _scores(job["result"], 3) if job["result"] else "",
            "time": when(job["ended_at"], seconds=False) if job["ended_at"] else time_left(job, now),
            "task": job["task_id"][:13],
            "submission": job["submission"]["repo"] if job["submission"] else "",
        }
        table.add_row(*cells(*(row[name] for name in names)))
    return table


def going_on(job: Job) -> str:
    """What is done at the moment, or why it ended."""
    live = job["live"]
    if live is None:
        return job["end_reason"] or ""
    if live["trouble"]:
        return str(live["trouble"])
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
    """Everything of one job. What several parts of it say is said once."""
    now = time.time() if now is None else now
    said = {job["detail"], ""}
    yield _facts(job, now)
    if job["attempts"]:
        yield ""
        yield _attempts(job["attempts"])
        yield from _details("attempt", job["attempts"], "number", said)
    if job["steps"]:
        yield ""
        yield _steps(job["steps"])
        yield from _details("step", job["steps"], "name", said)


def _facts(job: Job, now: float) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _fact_rows(job, now):
        if value:
            table.add_row(name, str(value))
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
    if job["result"]:
        yield from _result_rows(job["result"])
    yield "started", when(job["started_at"]) + (f", {job['starts']} times" if job["starts"] > 1 else "")
    yield "deadline", f"{when(job['deadline_at'])} ({time_left(job, now)})"
    yield "wanted as", job["expected_repo_name"]
    if job["submission"]:
        published = f"{job['submission']['repo']} at {when(job['submitted_at'])}"
        yield "published", published
    yield "folder", job["folder"]


def _result_rows(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if result["best"] is not None:
        step = f", best at step {result['best_step']:,}"
        yield "score", f"{result['metric']} {_scores(result, 4)}{step} of attempt {result['attempt']}"
    parts = [f"{result['steps']:,} steps in {show_seconds(result['seconds'])}"]
    parts += [f"{result['tokens_s']:,.0f} tokens/s"] if result["tokens_s"] else []
    parts += [f"{show_bytes(result['memory_bytes'])} of memory at most"] if result["memory_bytes"] else []
    yield "trained", ", ".join(parts)


def _scores(result: Mapping[str, Any], digits: int) -> str:
    """Before and after the training."""
    if result["best"] is None:
        return ""
    before = f"{result['base']:.{digits}f} → " if result["base"] is not None else ""
    return f"{before}{result['best']:.{digits}f}"


def _attempts(attempts: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("attempt", "engine", "GPUs", "began", "took", "ended", "score")
    for one in attempts:
        table.add_row(
            str(one["number"]),
            one["engine"],
            ", ".join(one["gpus"]),
            when(one["started_at"]),
            _took(one["started_at"], one["ended_at"]),
            one["end_reason"] or "running",
            _scores(one["result"], 4) if one["result"] else "",
        )
    return table


def _steps(steps: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("step", "attempt", "began", "took", "came to")
    for one in steps:
        table.add_row(
            one["name"],
            str(one["attempt"] or ""),
            when(one["began_at"]),
            _took(one["began_at"], one["ended_at"]),
            one["outcome"] or "going on",
        )
    return table


def _details(
    what: str, rows: Sequence[Mapping[str, Any]], name: str, said: set[str]
) -> Iterator[RenderableType]:
    """Below their table, as wide as the terminal: a column of a table would leave them a few letters."""
    for one in rows:
        if one["detail"] not in said:
            said.add(one["detail"])
            yield Padding(Text(f"{what} {one[name]}: {one['detail']}"), (0, 0, 0, 2))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _took(began: float, ended: float | None) -> str:
    return show_seconds(ended - began) if ended else ""


def when(at: float, *, seconds: bool = True) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%m-%d %H:%M:%S" if seconds else "%m-%d %H:%M")
