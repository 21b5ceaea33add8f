"""Reports for people: text for a terminal of 80 columns, Markdown, and HTML that mail clients show.

All three are drawn from the same sections, so that none says more than another. Names of models and texts of
alerts come from outside: HTML escapes them, Markdown and text lose their control characters.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from core.domain.records import printable
from core.domain.units import rfc3339, show_dollars, show_shares
from miner.api.reports import GoalCheck, Report
from miner.reports.money import money_line

WIDTH = 80
NOT_KNOWN = "not known"


@dataclass(frozen=True)
class ReportSection:
    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    #: Shown instead of a table, or below it.
    text: str = ""
    #: By GPU, the share of each interval, or None if it was not measured.
    occupancy: Mapping[str, Sequence[float | None]] = field(default_factory=dict)


def show_number(value: float | None, unit: str) -> str:
    if value is None:
        return NOT_KNOWN
    if unit == "share":
        return f"{value:.1%}"
    if unit == "hours":
        return f"{value:.1f} h"
    if unit == "dollars":
        return show_dollars(value)
    return f"{value:.2f}" if unit == "points" else f"{value:g}"


def report_sections(report: Report) -> list[ReportSection]:
    """The report, in the order in which it is read."""
    makers: list[Callable[[Report], ReportSection]] = [
        _summary,
        _goals,
        _ends,
        *(_success(name, title) for name, title in _GROUPS),
        _gpus,
        _rank,
        _gains,
        _quality,
        _wins,
        _alerts,
        _actions,
    ]
    sections = [make(report) for make in makers]
    return [*sections, _backtest(report)] if report.backtest is not None else sections


_GROUPS = (("type", "task"), ("family", "family"), ("size", "size"))


def _summary(report: Report) -> ReportSection:
    rows = []
    for figure in report.summary:
        unit, target = figure.unit, figure.target
        mark = {True: "met", False: "missed", None: ""}[figure.met]
        rows.append(
            (
                figure.title,
                show_number(figure.value, unit),
                show_number(figure.before, unit),
                "" if target is None else show_number(target, unit),
                mark,
            )
        )
    return ReportSection("Summary", ("", "now", "before", "target", ""), tuple(rows))


def _goals(report: Report) -> ReportSection:
    rows = []
    for goal in report.goals:
        checks = {check.what: check for check in goal.checks}
        due = NOT_KNOWN if goal.due_at is None else rfc3339(goal.due_at)[:10]
        cells = (_goal_cell(checks.get(what)) for what in ("jobs", "top", "success_rate"))
        rows.append((goal.name, "reached" if goal.met else "open", due, *cells))
    columns = ("goal", "", "due", "jobs", "rank in the best", "success")
    return ReportSection("Goals", columns, tuple(rows), "" if rows else "The policy has none.")


def _goal_cell(check: GoalCheck | None) -> str:
    if check is None:
        return ""
    form = "{:.0f}" if check.what == "jobs" else "{:.0%}"
    value = NOT_KNOWN if check.value is None else form.format(check.value)
    return f"{value} (goal {form.format(check.target)})"


def _ends(report: Report) -> ReportSection:
    rows = [(reason, str(count)) for reason, count in report.jobs.reasons.items()]
    return ReportSection("Jobs by end", ("end", "jobs"), tuple(rows), "" if rows else "No job ended.")


def _success(name: str, title: str) -> Callable[[Report], ReportSection]:
    def make(report: Report) -> ReportSection:
        rows = tuple(
            (
                row.name,
                str(row.jobs),
                show_number(row.rate, "share"),
                show_number(row.mean_hours, "hours"),
            )
            for row in getattr(report.success, name)
        )
        text = "" if rows else "No job ended."
        return ReportSection(f"Success by {title}", (title, "jobs", "success", "mean"), rows, text)

    return make


def _gpus(report: Report) -> ReportSection:
    gpus = report.gpus
    if not gpus.measured_hours:
        return ReportSection("GPUs", text="No GPU was measured in this time.")
    rows = (
        ("used", show_number(gpus.used_hours, "hours")),
        ("idle", show_number(gpus.idle_hours, "hours")),
        ("utilisation", show_number(gpus.utilization, "share")),
        ("utilisation while a job had them", show_number(gpus.utilization_of_jobs, "share")),
    )
    hours = f"{gpus.interval_s / 3600:g} h"
    text = f"A column is {hours}: how much of it a job had the GPU. Empty, or a dot: not measured."
    return ReportSection("GPUs", ("", ""), rows, text, gpus.occupancy)


def _rank(report: Report) -> ReportSection:
    rank = report.rank
    last, first = rank.last, rank.first
    if last is None or first is None:
        return ReportSection("Rank", text="Not registered, or the metagraph was not read in this time.")
    rows = [("now", f"{last.rank} of {last.miners}"), ("at the beginning", str(first.rank))]
    if rank.best is not None:
        rows += [("best", str(rank.best)), ("worst", str(rank.worst))]
    rows += [("incentive", f"{last.incentive:.5f}"), ("emission", f"{last.emission:.5f}")]
    history = ", ".join(f"{point.rank}" for point in rank.history[-20:])
    return ReportSection("Rank", ("", ""), tuple(rows), f"Lately: {history}" if history else "")


def _gains(report: Report) -> ReportSection:
    rows = tuple(
        (
            str(row.job_id),
            row.kind,
            row.model,
            _score(row.base),
            _score(row.best),
            show_number(row.gain, "share"),
            show_number(row.final, "points"),
        )
        for row in report.gains
    )
    columns = ("job", "task", "model", "base", "best", "gain", "quality × work")
    return ReportSection("Gains over the base", columns, rows, "" if rows else "Nothing was measured.")


def _score(value: float | None) -> str:
    return NOT_KNOWN if value is None else f"{value:.4g}"


def _quality(report: Report) -> ReportSection:
    rows = tuple(
        (
            rfc3339(week.begins_at)[:10],
            str(week.jobs),
            show_number(week.quality, "points"),
            f"{week.final:.1f}",
        )
        for week in report.quality
    )
    text = "Normalised as validators do, in a field of own jobs (docs/reports.md)."
    return ReportSection("Quality by week", ("from", "jobs", "quality", "quality × work"), rows, text)


def _wins(report: Report) -> ReportSection:
    rows = (("first places", report.first_place), ("tournaments", report.tournaments))
    return ReportSection("First places and tournaments", ("", ""), rows)


def _alerts(report: Report) -> ReportSection:
    rows = tuple(
        (row.rule, row.severity, str(row.raised), str(row.still_open), row.example) for row in report.alerts
    )
    columns = ("rule", "severity", "raised", "open", "text")
    return ReportSection("Alerts", columns, rows, "" if rows else "None.")


def _actions(report: Report) -> ReportSection:
    rows = tuple((row.rule, row.kind, row.outcome, str(row.count)) for row in report.actions)
    return ReportSection(
        "What rules did", ("rule", "what", "outcome", "times"), rows, "" if rows else "Nothing."
    )


def _backtest(report: Report) -> ReportSection:
    rows = tuple(
        (
            run.name,
            str(run.offers),
            str(run.accepted),
            f"{run.points:.1f}",
            f"{run.points_per_gpu_hour:.3f}",
        )
        for run in report.backtest or ()
    )
    text = "" if rows else "No offers came in this time."
    columns = ("policy", "offers", "accepted", "points", "per GPU-hour")
    return ReportSection("What other policies would have done", columns, rows, text)


# Text


def as_text(report: Report) -> str:
    """Draw the report for a terminal, at most 80 columns wide."""
    lines = [report.title, "=" * min(len(report.title), WIDTH)]
    lines += textwrap.wrap(money_line(report.money), WIDTH) if report.money else []
    for section in report_sections(report):
        lines += ["", section.title, "-" * len(section.title)]
        lines += _text_table(section)
        for gpu, shares in section.occupancy.items():
            lines.append(f"{_short(gpu, 14):14}  {show_shares(shares)}")
        if section.text:
            lines += textwrap.wrap(section.text, WIDTH)
    return printable("\n".join(lines)) + "\n"


def _text_table(section: ReportSection) -> Iterator[str]:
    """Columns as wide as their cells; the widest give way until the line fits."""
    if not section.rows:
        return
    cells = [tuple(" ".join(cell.split()) for cell in row) for row in section.rows]
    headed = [section.columns, *cells] if any(section.columns) else cells
    widths = [max(len(row[index]) for row in headed) for index in range(len(section.columns))]
    while sum(widths) + 2 * (len(widths) - 1) > WIDTH:
        widths[widths.index(max(widths))] -= 1
    for row in headed:
        yield "  ".join(
            f"{_short(cell, width):{width}}" for cell, width in zip(row, widths, strict=True)
        ).rstrip()


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


# Markdown


def as_markdown(report: Report) -> str:
    parts = [f"# {report.title}"]
    parts += [money_line(report.money)] if report.money else []
    for section in report_sections(report):
        parts.append(f"## {section.title}")
        if section.rows:
            lines = [_markdown_row(section.columns), "|" + "---|" * len(section.columns)]
            parts.append("\n".join([*lines, *(_markdown_row(row) for row in section.rows)]))
        if section.occupancy:
            bars = (
                f"{_short(printable(gpu), 14):14}  {show_shares(shares)}"
                for gpu, shares in section.occupancy.items()
            )
            parts.append("\n".join(["```text", *bars, "```"]))
        if section.text:
            parts.append(section.text)
    return "\n\n".join(parts) + "\n"


#: Characters that would end a cell or begin markup in it. Renderers differ in whether a backslash escapes
#: `<`.
_MARKDOWN = {ord(char): f"\\{char}" for char in "\\|`*_[]!#"} | {
    ord("<"): "&lt;",
    ord(">"): "&gt;",
    ord("&"): "&amp;",
    ord("@"): "@\N{ZERO WIDTH SPACE}",
}


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_markdown_cell(cell) for cell in cells) + " |"


def _markdown_cell(text: str) -> str:
    return printable(" ".join(text.split())).translate(_MARKDOWN)


# HTML

_BODY = "font-family:sans-serif;font-size:14px;color:#222;background:#fff;max-width:760px;margin:16px"
_CELL = "padding:2px 12px 2px 0;text-align:left;vertical-align:top"
_COLUMN, _ROW, _LABEL = 18, 20, 120


def as_html(report: Report) -> str:
    """One file: styles in the elements, as mail clients drop all others; no script, nothing from outside."""
    title = _escaped(report.title)
    parts = [f"<h1 style='font-size:20px'>{title}</h1>"]
    parts += [f"<p style='font-weight:bold'>{_escaped(money_line(report.money))}</p>"] if report.money else []
    for section in report_sections(report):
        parts.append(f"<h2 style='font-size:16px;margin:20px 0 6px'>{_escaped(section.title)}</h2>")
        if section.rows:
            parts.append(_html_table(section))
        if section.occupancy:
            parts.append(_occupancy_svg(section.occupancy))
        if section.text:
            parts.append(f"<p style='color:#666;margin:4px 0'>{_escaped(section.text)}</p>")
    body = "\n".join(parts)
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{title}</title></head>\n"
        f"<body style='{_BODY}'>\n{body}\n</body></html>\n"
    )


def _html_table(section: ReportSection) -> str:
    lines = ["<table style='border-collapse:collapse'>"]
    if any(section.columns):
        lines.append(_html_row(section.columns, "th"))
    lines += [_html_row(row, "td") for row in section.rows]
    return "\n".join([*lines, "</table>"])


def _html_row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag} style='{_CELL}'>{_escaped(cell)}</{tag}>" for cell in cells) + "</tr>"


def _occupancy_svg(occupancy: Mapping[str, Sequence[float | None]]) -> str:
    """A row of cells for each GPU, darker where a job had it; hollow where it was not measured."""
    columns = max(len(shares) for shares in occupancy.values())
    width, height = _LABEL + columns * _COLUMN, len(occupancy) * _ROW
    parts = [
        f"<svg width='{width}' height='{height}' viewBox='0 0 {width} {height}' role='img' "
        "aria-label='Occupancy of each GPU'>"
    ]
    for index, (gpu, shares) in enumerate(occupancy.items()):
        top = index * _ROW
        parts.append(f"<text x='0' y='{top + 14}' font-size='12'>{_escaped(_short(gpu, 16))}</text>")
        for column, share in enumerate(shares):
            fill = (
                "fill='none'" if share is None else f"fill='#1f6feb' fill-opacity='{0.08 + 0.92 * share:.2f}'"
            )
            parts.append(
                f"<rect x='{_LABEL + column * _COLUMN}' y='{top + 2}' width='{_COLUMN - 2}' "
                f"height='{_ROW - 4}' stroke='#ccc' {fill}/>"
            )
    return "\n".join([*parts, "</svg>"])


def _escaped(text: str) -> str:
    return html.escape(printable(text), quote=True)
