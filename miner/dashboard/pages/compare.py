"""Jobs side by side: curves in one chart, and a table of scores, costs and differences of the plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any
from urllib.parse import urlencode

from nicegui import ui

from core.domain.units import show_dollars
from miner.api.comparison import ComparedCurve, ComparedJob, JobComparison, show_value
from miner.dashboard.charts import LineChart, Series
from miner.dashboard.daemons import DaemonTrouble
from miner.dashboard.job_texts import job_title, state_text
from miner.dashboard.layout import PageView, page, page_head
from miner.dashboard.parts import (
    UNKNOWN,
    Column,
    Link,
    Table,
    box,
    duration,
    empty,
    number,
    panel,
    percent,
    set_visible,
    short_model,
    size,
)

#: A row of the table: its name, and a cell for each job.
Row = tuple[str, ...]
_AXES = {"step": "over steps", "time": "over minutes"}


@page("/compare", "Compare", place=25)
async def compare_page(view: PageView, jobs: str = "", x: str = "step") -> None:
    x = x if x in _AXES else "step"
    _, end = page_head("Compare")
    with end:
        for name, title in _AXES.items():
            link = Link(title, view.href("/compare", jobs=jobs, x=name), "choice")
            if name == x:
                link.props('aria-current="true"')
    _job_choice(view, jobs, x)
    if not jobs.strip():
        set_visible(empty("Type the numbers of some jobs, or pick them in the list of jobs."), True)
        Link("All jobs", view.href("/jobs"))
        return
    path = "/compare?" + urlencode({"jobs": ",".join(jobs.replace(",", " ").split())})
    try:
        first = await view.get(path, JobComparison)
    except DaemonTrouble as error:
        view.explain(error, path)
        return
    with box("grid even"):
        with panel(f"Training loss {_AXES[x]}", "w6"):
            loss = LineChart("Training loss of each job", nothing="No step has been reported.", legend=True)
        with panel(f"Held out {_AXES[x]}", "w6"):
            scores = LineChart("Held-out score of each job", nothing="Nothing was evaluated.", legend=True)
    with panel("Side by side"):
        columns: list[Column[Row]] = [Column("", itemgetter(0), classes="strong")]
        for place, one in enumerate(first.jobs, 1):
            columns.append(Column(f"#{one.job.id}", itemgetter(place), classes="num"))
        table: Table[Row] = Table("Side by side", columns, key=itemgetter(0))
    with panel("Plans"):
        plans: Table[Row] = Table("Differences of the plans", columns, key=itemgetter(0))
        equal = empty("Their plans are equal, or only one is known.")
    with box("row"):
        for one in first.jobs:
            Link(job_title(one.job), view.href(f"/jobs/{one.job.id}"))

    def show(answer: JobComparison) -> None:
        loss.show(_lines(answer.jobs, x, _loss))
        scores.show(_lines(answer.jobs, x, _held_out))
        table.show((name, *cells) for name, cells in _rows(answer.jobs).items() if any(cells))
        rows = [(_breakable(row.name), *map(_plan_cell, row.values)) for row in answer.plan]
        set_visible(equal, plans.show(rows) == 0)

    view.live(path, JobComparison, show, every=5.0)


def _job_choice(view: PageView, jobs: str, x: str) -> None:
    def compare() -> None:
        ui.navigate.to(view.href("/compare", jobs=",".join(str(chosen.value or "").split()), x=x))

    with box("row"):
        chosen = ui.input("Jobs, like 12 15 17", value=" ".join(jobs.replace(",", " ").split()))
        chosen.props("outlined dense").style("width:260px").on("keydown.enter", compare)
        ui.button("Compare", color=None, on_click=compare).props("flat no-caps").classes("plain")


def _loss(job: ComparedJob) -> ComparedCurve:
    return job.loss


def _held_out(job: ComparedJob) -> ComparedCurve:
    return job.held_out


def _lines(
    jobs: Sequence[ComparedJob], x: str, curve_of: Callable[[ComparedJob], ComparedCurve]
) -> list[Series]:
    found = []
    for place, job in enumerate(jobs):
        curve, points = curve_of(job), curve_of is _held_out
        if curve.value:
            across = curve.step if x == "step" else [seconds / 60 for seconds in curve.seconds]
            found.append(Series(_name(job), across, curve.value, colour=place, points=points))
    return found


def _name(job: ComparedJob) -> str:
    return f"#{job.job.id} {job.profile or short_model(job.job.model)}"


def _rows(jobs: Sequence[ComparedJob]) -> dict[str, list[str]]:
    return {
        "Model": [short_model(one.job.model) for one in jobs],
        "Profile": [one.profile or "" for one in jobs],
        "Tags": [" ".join(one.job.tags) for one in jobs],
        "Note": [one.job.note for one in jobs],
        "State": [one.job.end_reason or state_text(one.job)[0] for one in jobs],
        "Held out": [_scores(one) for one in jobs],
        "Gain": [_known(one.figures.gain, lambda gain: percent(gain, 1)) for one in jobs],
        "Steps": [f"{one.figures.steps:,}" if one.figures.steps else "" for one in jobs],
        "Took": [_known(one.job.took_s, duration) for one in jobs],
        "Tokens/s": [_known(one.figures.tokens_s, number) for one in jobs],
        "Memory, fullest GPU": [_known(one.figures.memory_bytes, size) for one in jobs],
        "GPU-hours": [f"{one.job.gpu_hours:.2f}" for one in jobs],
        "Cost": [_known(one.job.cost, show_dollars) for one in jobs],
    }


def _known(value: float | None, show: Callable[[float], str]) -> str:
    return "" if value is None else show(value)


def _scores(job: ComparedJob) -> str:
    base, best = job.figures.base, job.figures.best
    return "" if best is None else f"{number(base)} → {number(best)}" if base is not None else number(best)


def _plan_cell(value: Any) -> str:
    return UNKNOWN if value is None else _breakable(show_value(value))


def _breakable(text: str) -> str:
    """Let a phone break `optimizer.learning_rate` at its dots and underscores."""
    return text.replace(".", ".\N{ZERO WIDTH SPACE}").replace("_", "_\N{ZERO WIDTH SPACE}")
