"""Alerts: what is open, what was, every rule with what it measures, and silences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from nicegui import ui

from miner.dashboard.daemons import DaemonLink
from miner.dashboard.job_texts import alert_tone, subject_text
from miner.dashboard.layout import PageView, page, page_head
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

Record = Mapping[str, Any]
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

    def show(answer: dict[str, Any]) -> None:
        problem.show(f"alerts.yaml: {answer['problem']}" if answer.get("problem") else "")
        set_visible(problem, bool(answer.get("problem")))
        alerts = answer["alerts"]
        open_alerts.show([one for one in alerts if one["resolved_at"] is None], answer["silences"])
        silences.show(answer["silences"])
        rules.show(sorted(answer["rules"], key=_rule_order))
        over = [one for one in alerts if one["resolved_at"] is not None]
        set_visible(nothing, history.show(over) == 0)

    view.live(_ALERTS, show, every=3.0)
    view.follow(open_alerts.show_lost)


NO_ALERTS = "Nothing is wrong. Rules are listed below with what they measure now."


class _OpenAlerts:
    def __init__(self, view: PageView) -> None:
        self._view = view
        with panel("Open"):
            self._rows: KeyedRows[Record] = KeyedRows(box("rows"), self._make)
            self._nothing = empty(NO_ALERTS)

    def show_lost(self, link: DaemonLink) -> None:
        if link.lost_at is not None:
            self._nothing.show("Current alerts are unknown.")
            set_visible(self._nothing, True)

    def show(self, alerts: list[Record], silences: list[Record]) -> None:
        self._nothing.show(NO_ALERTS)
        items = [(one["id"], {**one, "silenced": _is_silenced(one, silences)}) for one in alerts]
        set_visible(self._nothing, self._rows.show(items) == 0)

    def _make(self, alert: Record) -> Callable[[Record], None]:
        with box("alert-row"):
            with box("stack"):
                with box("row").style("gap:2px 10px"):
                    Text(alert["rule"], f"state strong {alert_tone(alert)}")
                    about = Text("", "small muted")
                text = Text("")
            button = ui.button("Silence", color=None, on_click=partial(self._silence, alert))
            button.props("flat no-caps").classes("plain")

        def show(one: Record) -> None:
            times = f", {one['times']} times" if one["times"] > 1 else ""
            quiet = ", silenced" if one["silenced"] else ""
            since = ago(one["raised_at"]).removesuffix(" ago")
            about.show(f"{subject_text(one)}, for {since}{times}{quiet}")
            text.show(one["text"])
            set_visible(button, not one["silenced"])

        return show

    async def _silence(self, alert: Record) -> None:
        hours = await _ask_hours(self._view, alert)
        if hours is None:
            return
        wanted = {
            "rule": alert["rule"],
            "subject": alert["subject"],
            "seconds": hours * 3600,
            "reason": "from the page",
        }
        answer = await self._view.act(
            "POST",
            "/alerts/silences",
            wanted,
            question=f"Silence {alert['rule']} of {alert['subject']} for {duration(hours * 3600)}?",
            text="Nobody is notified of it until then. It is still shown here.",
            button="Silence",
        )
        if answer is not None:
            await self._view.link.look_again(_ALERTS)


def _is_silenced(alert: Record, silences: list[Record]) -> bool:
    """Silences are patterns, like `gpu-*`."""
    return any(
        fnmatchcase(alert["rule"], one["rule"]) and fnmatchcase(alert["subject"], one["subject"])
        for one in silences
    )


async def _ask_hours(view: PageView, alert: Record) -> float | None:
    with view.client, ui.dialog() as dialog, ui.card().classes("ask"):
        Text(f"Silence {alert['rule']} for how long?", "strong")
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
            self._rows: KeyedRows[Record] = KeyedRows(box("rows"), self._make)

    def show(self, silences: list[Record]) -> None:
        set_visible(self._panel, self._rows.show((one["id"], one) for one in silences) > 0)

    def _make(self, silence: Record) -> Callable[[Record], None]:
        with box("alert-row"):
            with box("stack"):
                Text(f"{silence['rule']} of {silence['subject']}", "strong")
                about = Text("", "small muted")
            button = ui.button("End it", color=None, on_click=partial(self._end, silence))
            button.props("flat no-caps").classes("plain")

        def show(one: Record) -> None:
            reason = f": {one['reason']}" if one["reason"] else ""
            about.show(f"until {clock(one['until'])}{reason}")

        return show

    async def _end(self, silence: Record) -> None:
        answer = await self._view.act(
            "DELETE",
            f"/alerts/silences/{silence['id']}",
            question=f"End the silence of {silence['rule']}?",
            button="End it",
        )
        if answer is not None:
            await self._view.link.look_again(_ALERTS)


def _rules_table() -> Table:
    with panel("Rules", note="as they stand now; `god-miner alerts list` has them too"):
        return Table(
            "Rules",
            [
                Column("Rule", lambda one: one["name"], classes="nowrap"),
                Column("State", _rule_state, classes="states"),
                Column("Subject", lambda one: subject_text(one) or UNKNOWN, classes="nowrap"),
                Column("Value", lambda one: one["value_text"] or UNKNOWN, number=True),
                Column("Limit", lambda one: one["limit_text"], classes="nowrap"),
                Column("Metric", lambda one: one["metric"] or UNKNOWN, classes="wide-only nowrap"),
                Column("What it is about", lambda one: one["description"], classes="why wide-only"),
            ],
            key=lambda one: (one["name"], one["subject"]),
        )


def _rule_order(rule: Record) -> int:
    """What fires comes first, what was not measured last."""
    return 3 if rule["no_data"] else {"firing": 0, "pending": 1}.get(rule["state"], 2)


def _rule_state(rule: Record) -> tuple[str, Tone]:
    if rule["no_data"]:
        return "nothing measured", "muted"
    tones: dict[str, Tone] = {"firing": alert_tone(rule), "pending": "warn", "inactive": "good"}
    words = {"inactive": "fine"}
    state = str(rule["state"])
    return words.get(state, state), tones.get(state, "muted")


def _history_table() -> tuple[Table, Text]:
    with panel("History", note=f"of the last {HISTORY} alerts"):
        table = Table(
            "Alerts that are over",
            [
                Column("Raised", lambda one: clock(one["raised_at"]), classes="nowrap"),
                Column("Lasted", lambda one: duration(one["resolved_at"] - one["raised_at"]), number=True),
                Column("Rule", lambda one: (one["rule"], alert_tone(one)), classes="states"),
                Column("Subject", subject_text, classes="nowrap wide-only"),
                Column("Text", lambda one: one["text"], classes="why"),
            ],
            key=lambda one: one["id"],
        )
        return table, empty("No alert has been resolved yet.")
