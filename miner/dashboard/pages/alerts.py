"""Alerts: what is open, what was, every rule with what it measures, and silences."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from nicegui import ui

from miner.api.alerts import Alert, AlertsPage, EndedSilence, RuleStatus, Silence, SilenceRequest
from miner.dashboard.daemons import DaemonLink
from miner.dashboard.job_texts import severity_tone, subject_text
from miner.dashboard.layout import PageView, Question, page, page_head
from miner.dashboard.parts import (
    UNKNOWN,
    Column,
    KeyedRows,
    Table,
    Text,
    Tone,
    ago,
    box,
    clock,
    duration,
    empty,
    panel,
    set_visible,
)

HISTORY = 200
#: How long the silence button silences.
SILENCE_HOURS = (1, 8, 24, 24 * 7)
_ALERTS = f"/alerts?limit={HISTORY}"


@page("/alerts", "Alerts", place=60)
def alerts_page(view: PageView) -> None:
    page_head("Alerts")
    problem = Text("", "notice hidden", "p").props('role="status"')
    open_alerts = _OpenAlerts(view)
    silences = _Silences(view)
    rules = _rules_table()
    history, nothing = _history_table()

    def show(answer: AlertsPage) -> None:
        problem.show(f"alerts.yaml: {answer.problem}" if answer.problem else "")
        set_visible(problem, bool(answer.problem))
        alerts = answer.alerts
        open_alerts.show([one for one in alerts if one.resolved_at is None], answer.silences)
        silences.show(answer.silences)
        rules.show(sorted(answer.rules, key=_rule_order))
        over = [one for one in alerts if one.resolved_at is not None]
        set_visible(nothing, history.show(over) == 0)

    view.live(_ALERTS, AlertsPage, show, every=3.0)
    view.follow(open_alerts.show_lost)


NO_ALERTS = "Nothing is wrong. Rules are listed below with what they measure now."


class _OpenAlert(NamedTuple):
    alert: Alert
    silenced: bool


class _OpenAlerts:
    def __init__(self, view: PageView) -> None:
        self._view = view
        with panel("Open"):
            self._rows: KeyedRows[_OpenAlert] = KeyedRows(box("rows"), self._make)
            self._nothing = empty(NO_ALERTS)

    def show_lost(self, link: DaemonLink) -> None:
        if link.lost_at is not None:
            self._nothing.show("Current alerts are unknown.")
            set_visible(self._nothing, True)

    def show(self, alerts: list[Alert], silences: list[Silence]) -> None:
        self._nothing.show(NO_ALERTS)
        items = [(alert.id, _OpenAlert(alert, _is_silenced(alert, silences))) for alert in alerts]
        set_visible(self._nothing, self._rows.show(items) == 0)

    def _make(self, row: _OpenAlert) -> Callable[[_OpenAlert], None]:
        alert = row.alert
        with box("alert-row"):
            with box("stack"):
                with box("row").style("gap:2px 10px"):
                    Text(alert.rule, f"state strong {severity_tone(alert.severity)}")
                    about = Text("", "small muted")
                text = Text("")
            button = ui.button("Silence", color=None, on_click=partial(self._silence, alert))
            button.props("flat no-caps").classes("plain")

        def show(row: _OpenAlert) -> None:
            one = row.alert
            times = f", {one.times} times" if one.times > 1 else ""
            quiet = ", silenced" if row.silenced else ""
            since = ago(one.raised_at).removesuffix(" ago")
            about.show(f"{subject_text(one.subject)}, for {since}{times}{quiet}")
            text.show(one.text)
            set_visible(button, not row.silenced)

        return show

    async def _silence(self, alert: Alert) -> None:
        hours = await _ask_hours(self._view, alert)
        if hours is None:
            return
        silence = SilenceRequest(
            rule=alert.rule, subject=alert.subject, seconds=hours * 3600, reason="from the page"
        )
        question = Question(
            f"Silence {alert.rule} of {alert.subject} for {duration(hours * 3600)}?",
            "Silence",
            text="Nobody is notified of it until then. It is still shown here.",
        )
        if await self._view.act("POST", "/alerts/silences", Silence, question, silence) is not None:
            await self._view.link.look_again(_ALERTS)


def _is_silenced(alert: Alert, silences: list[Silence]) -> bool:
    """Silences are patterns, like `gpu-*`."""
    return any(
        fnmatchcase(alert.rule, one.rule) and fnmatchcase(alert.subject, one.subject) for one in silences
    )


async def _ask_hours(view: PageView, alert: Alert) -> float | None:
    with view.client, ui.dialog() as dialog, ui.card().classes("ask"):
        Text(f"Silence {alert.rule} for how long?", "strong")
        with box("row"):
            for hours in SILENCE_HOURS:
                button = ui.button(
                    duration(hours * 3600), color=None, on_click=partial(dialog.submit, float(hours))
                )
                button.props("flat no-caps").classes("plain")
    dialog.on("hide", dialog.delete)
    answer: float | None = await dialog
    return answer


class _Silences:
    def __init__(self, view: PageView) -> None:
        self._view = view
        with panel("Silences", "hidden") as self._panel:
            self._rows: KeyedRows[Silence] = KeyedRows(box("rows"), self._make)

    def show(self, silences: list[Silence]) -> None:
        set_visible(self._panel, self._rows.show((one.id, one) for one in silences) > 0)

    def _make(self, silence: Silence) -> Callable[[Silence], None]:
        with box("alert-row"):
            with box("stack"):
                Text(f"{silence.rule} of {silence.subject}", "strong")
                about = Text("", "small muted")
            button = ui.button("End it", color=None, on_click=partial(self._end, silence))
            button.props("flat no-caps").classes("plain")

        def show(one: Silence) -> None:
            reason = f": {one.reason}" if one.reason else ""
            about.show(f"until {clock(one.until)}{reason}")

        return show

    async def _end(self, silence: Silence) -> None:
        question = Question(f"End the silence of {silence.rule}?", "End it")
        path = f"/alerts/silences/{silence.id}"
        if await self._view.act("DELETE", path, EndedSilence, question) is not None:
            await self._view.link.look_again(_ALERTS)


def _rules_table() -> Table[RuleStatus]:
    with panel("Rules", note="as they stand now; `god-miner alerts list` has them too"):
        return Table(
            "Rules",
            [
                Column("Rule", "name", classes="nowrap"),
                Column("State", _rule_state, classes="states"),
                Column("Subject", "subject", _subject_or_none, classes="nowrap"),
                Column("Value", "value_text", _or_unknown, number=True),
                Column("Limit", "limit_text", classes="nowrap"),
                Column("Metric", "metric", _or_unknown, classes="wide-only nowrap"),
                Column("What it is about", "description", classes="why wide-only"),
            ],
            key=attrgetter("name", "subject"),
        )


def _or_unknown(text: str | None) -> str:
    return text or UNKNOWN


def _subject_or_none(subject: str) -> str:
    return subject_text(subject) or UNKNOWN


def _rule_order(rule: RuleStatus) -> int:
    """Sort firing rules first, those that were not measured last."""
    return 3 if rule.no_data else {"firing": 0, "pending": 1}.get(rule.state, 2)


def _rule_state(rule: RuleStatus) -> tuple[str, Tone]:
    if rule.no_data:
        return "nothing measured", "muted"
    shown: dict[str, tuple[str, Tone]] = {
        "firing": ("firing", severity_tone(rule.severity)),
        "pending": ("pending", "warn"),
        "inactive": ("fine", "good"),
    }
    return shown.get(rule.state, (rule.state, "muted"))


def _history_table() -> tuple[Table[Alert], Text]:
    with panel("History", note=f"of the last {HISTORY} alerts"):
        table: Table[Alert] = Table(
            "Alerts that are over",
            [
                Column("Raised", "raised_at", clock, classes="nowrap"),
                Column("Lasted", _lasted, number=True),
                Column("Rule", _rule_name, classes="states"),
                Column("Subject", "subject", subject_text, classes="nowrap wide-only"),
                Column("Text", "text", classes="why"),
            ],
            key=attrgetter("id"),
        )
        return table, empty("No alert has been resolved yet.")


def _lasted(alert: Alert) -> str:
    return duration((alert.resolved_at or alert.raised_at) - alert.raised_at)


def _rule_name(alert: Alert) -> tuple[str, Tone]:
    return alert.rule, severity_tone(alert.severity)
