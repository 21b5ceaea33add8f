"""The report of the last day, week or month."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from core.domain.units import show_dollars
from miner.api.reports import GoalProgress, GpuUse, JobGain, Report, SummaryFigure
from miner.dashboard.charts import LineChart, Series
from miner.dashboard.layout import PageView, page, page_head
from miner.dashboard.parts import (
    UNKNOWN,
    Column,
    FigureTile,
    KeyedRows,
    Link,
    Table,
    Text,
    Tone,
    box,
    duration,
    empty,
    number,
    panel,
    percent,
    set_visible,
    short_model,
)
from miner.reports.text import ReportSection, report_sections

PERIODS = {"daily": "Day", "weekly": "Week", "monthly": "Month"}
#: Sections that are drawn as they are in the text of a report, with their width.
_SECTIONS = {
    "Success by task": "w4",
    "Success by family": "w4",
    "Success by size": "w4",
    "Alerts": "w6",
    "What rules did": "w6",
}


@page("/report", "Report", place=70)
def report_page(view: PageView, period: str = "daily") -> None:
    period = period if period in PERIODS else "daily"
    heading, end = page_head("Report")
    with end:
        for name, title in PERIODS.items():
            link = Link(title, view.href("/report", period=name), "choice")
            if name == period:
                link.props('aria-current="true"')
    summary: KeyedRows[SummaryFigure] = KeyedRows(box("figures"), _make_figure)
    goals = _Goals()
    occupancy = _Occupancy()
    with box("grid"):
        with panel("Rank", "w6"):
            rank = LineChart("Rank over time", time_axis=True, nothing="No rank in this time.")
        with panel("Quality by week", "w6"):
            quality = LineChart("Quality", time_axis=True, nothing="No job has a score yet.")
    gains, no_gains = _gains_table(view)
    with box("grid"):
        sections = {title: _SectionPanel(title, width) for title, width in _SECTIONS.items()}

    def show(report: Report) -> None:
        heading.show(report.title)
        summary.show((figure.name, figure) for figure in report.summary)
        goals.show(report.goals)
        occupancy.show(report.gpus)
        ranks = [(point.at, float(point.rank)) for point in report.rank.history]
        rank.show(_over_time("rank", ranks))
        weeks = [(week.begins_at, week.quality) for week in report.quality if week.quality is not None]
        quality.show(_over_time("quality", weeks))
        set_visible(no_gains, gains.show(report.gains) == 0)
        for section in report_sections(report):
            if section.title in sections:
                sections[section.title].show(section)

    # A report reads months of history: it is no live view.
    view.live(f"/report?period={period}", Report, show, every=60.0)


def _over_time(name: str, points: Sequence[tuple[float, float]]) -> list[Series]:
    if not points:
        return []
    times, values = [at * 1000 for at, _ in points], [value for _, value in points]
    return [Series(name, times, values, points=len(points) < 30)]


class _SectionPanel:
    """A section of the report as a table, with the columns that it has."""

    def __init__(self, title: str, width: str) -> None:
        with panel(title, width):
            self._place = box()
            self._text = empty("")
        self._title = title
        self._table: Table[tuple[str, ...]] | None = None

    def show(self, section: ReportSection) -> None:
        if self._table is None:
            columns: list[Column[tuple[str, ...]]] = [
                Column(title, itemgetter(place)) for place, title in enumerate(section.columns)
            ]
            with self._place:
                self._table = Table(self._title, columns, key=tuple)
        self._table.show(section.rows)
        self._text.show(section.text)
        set_visible(self._place, bool(section.rows))
        set_visible(self._text, bool(section.text))


def _make_figure(figure: SummaryFigure) -> Callable[[SummaryFigure], None]:
    tile = FigureTile(figure.title)

    def show(one: SummaryFigure) -> None:
        value, unit = _value(one.value, one.unit)
        parts = []
        if one.target is not None:
            parts.append(f"goal {' '.join(_value(one.target, one.unit))}".strip())
        if one.before is not None:
            parts.append(f"{' '.join(_value(one.before, one.unit))}".strip() + " before")
        tone: Tone = "" if one.met is None else "good" if one.met else "warn"
        tile.show(value, unit, ", ".join(parts), tone)

    return show


def _value(value: float | None, unit: str) -> tuple[str, str]:
    if value is None:
        return UNKNOWN, ""
    if unit == "share":
        return f"{value * 100:.1f}".removesuffix(".0"), "%"
    if unit == "dollars":
        return show_dollars(value), ""
    if unit == "hours":
        return f"{value:,.1f}", "h"
    return (f"{value:.2f}", "") if unit == "points" else (f"{value:,.0f}", "")


class _Goals:
    def __init__(self) -> None:
        with panel("Goals", "hidden") as self._panel:
            self._rows: KeyedRows[GoalProgress] = KeyedRows(box("rows"), self._make)

    def show(self, goals: Sequence[GoalProgress]) -> None:
        set_visible(self._panel, self._rows.show((one.name, one) for one in goals) > 0)

    def _make(self, _goal: GoalProgress) -> Callable[[GoalProgress], None]:
        with box("row"):
            state, text = Text("", "state strong"), Text("")

        def show(one: GoalProgress) -> None:
            state.show(one.name, "good" if one.met else "muted")
            text.show(one.text)

        return show


class _Occupancy:
    """A row per GPU, a cell per interval: the darker, the longer a job had it."""

    def __init__(self) -> None:
        with panel("Occupancy of the GPUs") as _:
            self._about = Text("", "small muted")
            self._rows: KeyedRows[tuple[str, Sequence[float | None]]] = KeyedRows(box("rows"), self._make)
            self._nothing = empty("No GPU was measured in this time.")

    def show(self, gpus: GpuUse) -> None:
        hours = gpus.interval_s / 3600
        self._about.show(
            f"{gpus.used_hours:.1f} GPU-hours used, {gpus.idle_hours:.1f} idle; "
            f"a cell is {duration(hours * 3600)}, the darker the longer a job had the GPU"
        )
        rows = [(gpu, (gpu, shares)) for gpu, shares in gpus.occupancy.items()]
        set_visible(self._nothing, self._rows.show(rows) == 0)

    def _make(self, row: tuple[str, Sequence[float | None]]) -> Callable[[Any], None]:
        with box("occupancy"):
            Text(row[0], "small cut")
            with box("cells") as cells:
                made = [box("cell") for _ in row[1]]
        cells.props('role="img"')
        drawn: list[str] = [""] * len(made)

        def show(one: tuple[str, Sequence[float | None]]) -> None:
            known = [share for share in one[1] if share is not None]
            mean = percent(sum(known) / len(known)) if known else "not measured"
            cells.props["aria-label"] = f"{one[0]}: occupied {mean}"
            for place, (cell, share) in enumerate(zip(made, one[1], strict=False)):
                style = "" if share is None else f"--share:{max(0.04, share):.2f}"
                if style != drawn[place]:
                    drawn[place] = style
                    cell.style(replace=style)

        return show


def _gains_table(view: PageView) -> tuple[Table[JobGain], Text]:
    def job_page(gain: JobGain) -> str:
        return view.href(f"/jobs/{gain.job_id}")

    with panel("Base → best"):
        table: Table[JobGain] = Table(
            "Gains over the base",
            [
                Column("Job", _job_name, href=job_page),
                Column("Task", "kind", classes="wide-only"),
                Column("Metric", _metric, classes="wide-only"),
                Column("Base", "base", number, number=True),
                Column("Best", "best", number, number=True),
                Column("Gain", "gain", partial(percent, digits=1), number=True),
                Column("Quality", "quality", partial(number, digits=2), number=True, classes="wide-only"),
            ],
            key=attrgetter("job_id"),
        )
        return table, empty("No job with scores ended in this time.")


def _job_name(gain: JobGain) -> str:
    return f"#{gain.job_id} {short_model(gain.model)}"


def _metric(gain: JobGain) -> str:
    return gain.metric or UNKNOWN
