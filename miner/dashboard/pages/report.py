"""The report of the last day, week or month."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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

Record = Mapping[str, Any]
PERIODS = {"daily": "Day", "weekly": "Week", "monthly": "Month"}
_GROUPS = {"type": "Success by task", "family": "Success by family", "size": "Success by size"}


@page("/report", "Report", place=70)
def report_page(view: PageView, period: str = "daily") -> None:
    period = period if period in PERIODS else "daily"
    heading, end = page_head("Report")
    with end:
        for name, title in PERIODS.items():
            link = Link(title, view.href("/report", period=name), "choice")
            if name == period:
                link.props('aria-current="true"')
    summary: KeyedRows[Record] = KeyedRows(box("figures"), _make_figure)
    goals = _Goals()
    occupancy = _Occupancy()
    with box("grid"):
        groups = {name: _success_table(title) for name, title in _GROUPS.items()}
        with panel("Rank", "w6"):
            rank = LineChart("Rank over time", time_axis=True, nothing="No rank in this time.")
        with panel("Quality by week", "w6"):
            quality = LineChart("Quality", time_axis=True, nothing="No job has a score yet.")
    gains, no_gains = _gains_table(view)
    with box("grid"):
        with box("w6"):
            alerts, no_alerts = _alerts_table()
        with box("w6"):
            actions, no_actions = _actions_table()

    def show(report: dict[str, Any]) -> None:
        heading.show(report["title"])
        summary.show((one["name"], one) for one in report["summary"])
        goals.show(report["goals"])
        occupancy.show(report["gpus"])
        for name, (table, nothing) in groups.items():
            set_visible(nothing, table.show(report["success"][name]) == 0)
        history = report["rank"]["history"]
        rank.show([_over_time("rank", history, "rank")] if history else [])
        weeks = [week for week in report["quality"] if week["quality"] is not None]
        quality.show([_over_time("quality", weeks, "quality", "begins_at")] if weeks else [])
        set_visible(no_gains, gains.show(report["gains"]) == 0)
        set_visible(no_alerts, alerts.show(report["alerts"]) == 0)
        set_visible(no_actions, actions.show(report["actions"]) == 0)

    # A report reads months of history: it is no live view.
    view.live(f"/report?period={period}", show, every=60.0)


def _over_time(name: str, rows: Sequence[Record], key: str, at: str = "at") -> Series:
    return Series(name, [row[at] * 1000 for row in rows], [row[key] for row in rows], points=len(rows) < 30)


def _make_figure(figure: Record) -> Callable[[Record], None]:
    tile = FigureTile(figure["title"])

    def show(one: Record) -> None:
        value, unit = _value(one["value"], one["unit"])
        parts = []
        if one["target"] is not None:
            target, target_unit = _value(one["target"], one["unit"])
            parts.append(f"goal {target} {target_unit}".strip())
        if one["before"] is not None:
            before, before_unit = _value(one["before"], one["unit"])
            parts.append(f"{before} {before_unit}".strip() + " before")
        tone: Tone = "" if one["met"] is None else "good" if one["met"] else "warn"
        tile.show(value, unit, ", ".join(parts), tone)

    return show


def _value(value: float | None, unit: str) -> tuple[str, str]:
    if value is None:
        return UNKNOWN, ""
    if unit == "share":
        return f"{value * 100:.1f}".removesuffix(".0"), "%"
    if unit == "hours":
        return f"{value:,.1f}", "h"
    return (f"{value:.2f}", "") if unit == "points" else (f"{value:,.0f}", "")


class _Goals:
    def __init__(self) -> None:
        with panel("Goals", "hidden") as self._panel:
            self._rows: KeyedRows[Record] = KeyedRows(box("rows"), self._make)

    def show(self, goals: Sequence[Record]) -> None:
        set_visible(self._panel, self._rows.show((one["name"], one) for one in goals) > 0)

    def _make(self, _goal: Record) -> Callable[[Record], None]:
        with box("row"):
            state, text = Text("", "state strong"), Text("")

        def show(one: Record) -> None:
            state.show(one["name"], "good" if one["met"] else "muted")
            text.show(one["text"])

        return show


class _Occupancy:
    """A row per GPU, a cell per interval: the darker, the longer a job had it."""

    def __init__(self) -> None:
        with panel("Occupancy of the GPUs") as _:
            self._about = Text("", "small muted")
            self._rows: KeyedRows[tuple[str, Sequence[float | None]]] = KeyedRows(box("rows"), self._make)
            self._nothing = empty("No GPU was measured in this time.")

    def show(self, gpus: Record) -> None:
        hours = gpus["interval_s"] / 3600
        self._about.show(
            f"{gpus['used_hours']:.1f} GPU-hours used, {gpus['idle_hours']:.1f} idle; "
            f"a cell is {duration(hours * 3600)}, the darker the longer a job had the GPU"
        )
        rows = [(gpu, (gpu, shares)) for gpu, shares in gpus["occupancy"].items()]
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


def _success_table(title: str) -> tuple[Table, Text]:
    with panel(title, "w4"):
        table = Table(
            title,
            [
                Column("", lambda one: str(one["name"])),
                Column("Jobs", lambda one: number(one["jobs"]), number=True),
                Column("Success", lambda one: percent(one["rate"]), number=True),
                Column("Hours", lambda one: number(one["mean_hours"], 2), number=True),
            ],
            key=lambda one: one["name"],
        )
        return table, empty("No job ended in this time.")


def _gains_table(view: PageView) -> tuple[Table, Text]:
    with panel("Base → best"):
        table = Table(
            "Gains over the base",
            [
                Column(
                    "Job",
                    lambda one: f"#{one['job_id']} {short_model(one['model'])}",
                    href=lambda one: view.href(f"/jobs/{one['job_id']}"),
                ),
                Column("Task", lambda one: one["kind"], classes="wide-only"),
                Column("Metric", lambda one: one["metric"] or UNKNOWN, classes="wide-only"),
                Column("Base", lambda one: number(one["base"]), number=True),
                Column("Best", lambda one: number(one["best"]), number=True),
                Column("Gain", lambda one: percent(one["gain"], 1), number=True),
                Column("Quality", lambda one: number(one["quality"], 2), number=True, classes="wide-only"),
            ],
            key=lambda one: one["job_id"],
        )
        return table, empty("No job with scores ended in this time.")


def _alerts_table() -> tuple[Table, Text]:
    with panel("Alerts"):
        table = Table(
            "Alerts",
            [
                Column("Rule", lambda one: one["rule"]),
                Column("Raised", lambda one: number(one["raised"]), number=True),
                Column("Still open", lambda one: number(one["still_open"]), number=True),
            ],
            key=lambda one: one["rule"],
        )
        return table, empty("None was raised.")


def _actions_table() -> tuple[Table, Text]:
    with panel("What the rules did"):
        table = Table(
            "Actions of rules",
            [
                Column("Rule", lambda one: one["rule"]),
                Column("Asked for", lambda one: one["kind"]),
                Column("Came of it", lambda one: one["outcome"]),
                Column("Times", lambda one: number(one["count"]), number=True),
            ],
            key=lambda one: (one["rule"], one["kind"], one["outcome"]),
        )
        return table, empty("No rule had to act.")
