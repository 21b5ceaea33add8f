"""The time that a report is about: the last day, week or month, or one of the calendar."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from miner.api.reports import PeriodKind

_DAYS = {PeriodKind.DAILY: 1, PeriodKind.WEEKLY: 7, PeriodKind.MONTHLY: 30}
#: Columns of the occupancy picture for each day.
_COLUMNS = {PeriodKind.DAILY: 24, PeriodKind.WEEKLY: 4, PeriodKind.MONTHLY: 1}


@dataclass(frozen=True, slots=True)
class ReportPeriod:
    kind: PeriodKind
    begins_at: float
    ends_at: float

    @property
    def intervals(self) -> int:
        """Columns of the occupancy picture."""
        return round((self.ends_at - self.begins_at) / 86_400) * _COLUMNS[self.kind]

    @property
    def before(self) -> ReportPeriod:
        """The period of the same length just before."""
        return ReportPeriod(self.kind, 2 * self.begins_at - self.ends_at, self.begins_at)

    @property
    def title(self) -> str:
        first = datetime.fromtimestamp(self.begins_at, UTC)
        last = datetime.fromtimestamp(self.ends_at, UTC)
        return f"{self.kind.capitalize()} report, {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC"


def last_period(kind: PeriodKind, now: float) -> ReportPeriod:
    """The last 24 hours, 7 or 30 days."""
    return ReportPeriod(kind, now - _DAYS[kind] * 86_400, now)


def calendar_period(kind: PeriodKind, at: float) -> ReportPeriod:
    """The day, the week from Monday or the month (UTC) with this moment in it."""
    moment = datetime.fromtimestamp(at, UTC)
    begin = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    if kind is PeriodKind.WEEKLY:
        begin -= timedelta(days=begin.weekday())
    if kind is PeriodKind.MONTHLY:
        begin = begin.replace(day=1)
        end = (begin + timedelta(days=32)).replace(day=1)
    else:
        end = begin + timedelta(days=_DAYS[kind])
    return ReportPeriod(kind, begin.timestamp(), end.timestamp())


def finished_period(kind: PeriodKind, now: float) -> ReportPeriod:
    """The last period of the calendar that is over."""
    return calendar_period(kind, calendar_period(kind, now).begins_at - 1)
