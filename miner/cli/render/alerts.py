"""Tables of `god-miner alerts`, within 80 columns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.text import Text

from core.domain.units import show_seconds
from miner.api.alerts import Alert, AlertsPage, RuleStatus, Silence
from miner.cli.output import show_time
from miner.cli.render.terminal import plain_table

if TYPE_CHECKING:
    from rich.console import RenderableType

_STYLES = {"critical": "red", "warning": "yellow"}


def alert_pages(found: AlertsPage) -> Iterator[RenderableType]:
    """Alerts, then rules, then silences."""
    alerts, rules, silences = found.alerts, found.rules, found.silences
    if found.problem:
        yield Text(f"ALERTS_FILE is not in force: {found.problem}\n", style="red")
    if alerts:
        yield plain_table("since", "alert", "about", "text", rows=map(_alert_row, alerts))
    else:
        yield Text("no alerts")
    if rules:
        yield Text("")
        yield plain_table("rule", "about", "state", "value", rows=map(_rule_row, rules))
    if silences:
        yield Text("")
        yield plain_table("silence", "rule", "about", "until", "reason", rows=map(_silence_row, silences))


def _alert_row(row: Alert) -> tuple[Any, ...]:
    times = f" ({row.times} times)" if row.times > 1 else ""
    name = Text(row.rule, style=_STYLES.get(row.severity, "") if row.resolved_at is None else "dim")
    return (
        show_time(row.raised_at, seconds=False),
        name,
        short_subject(row.subject),
        row.text + times,
    )


def _rule_row(row: RuleStatus) -> tuple[str, ...]:
    state = row.state
    if state != "inactive":
        state += f" for {show_seconds(max(time.time() - row.since, 0.0))}"
    if not row.subject:
        return row.name, "", "nothing to measure", ""
    if row.no_data:
        state = "no data" if row.state == "inactive" else f"{state}, no data"
    return row.name, short_subject(row.subject), state, row.value_text or ""


def _silence_row(row: Silence) -> tuple[str, ...]:
    until = show_time(row.until, seconds=False)
    return str(row.id), row.rule, short_subject(row.subject), until, row.reason


def short_subject(subject: str) -> str:
    """GPUs and validators have long names, of which the beginning is enough."""
    kind, _, name = subject.partition(":")
    return subject if len(name) <= 12 else f"{kind}:{name[:12]}…"
