"""Send reports when their period is over, each of them once."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from miner.notify.notifier import Notifier, ReportNotice
from miner.offers.policies.schema import Policy
from miner.reports.periods import PeriodKind, ReportPeriod, finished_period
from miner.reports.report import build_report, redact_report
from miner.reports.text import as_html, as_markdown
from miner.store.ranks import record_sent_report, report_was_sent
from miner.store.store import Store

#: From which hour (UTC) of the next day on a report is sent.
REPORT_HOUR = 6


async def send_due_reports(
    store: Store,
    notifier: Notifier,
    policy: Policy,
    wanted: Iterable[str],
    now: float,
    redact: Callable[[str], str],
) -> None:
    """Hand the reports of the periods that are over to the notifier, from REPORT_HOUR on."""
    if datetime.fromtimestamp(now, UTC).hour < REPORT_HOUR:
        return
    for name in wanted:
        period = finished_period(PeriodKind(name), now)
        if await store.read(report_was_sent, name, period.begins_at):
            continue
        notice = await store.read(_notice, period, policy, redact)
        # Before it goes out: a daemon that is killed in between sends it never rather than twice.
        await store.write(record_sent_report, name, period.begins_at, now)
        notifier.add_report(notice)


def _notice(
    connection: sqlite3.Connection, period: ReportPeriod, policy: Policy, redact: Callable[[str], str]
) -> ReportNotice:
    report = redact_report(build_report(connection, period, policy), redact)
    return ReportNotice(period.title, as_markdown(report), as_html(report))
