"""Build a report from the store, and send it: the work of a day, a week or a month, its worth, and how it
compares with the time before and with the policy's goals.

The same rows give the same report. It takes a read connection and a fraction of a second; the daemon builds
it in a thread.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from core.domain.hardware import Hardware
from core.domain.job_states import JobState
from core.profile.resolve import LoadedProfile
from miner.api.reports import (
    EndedJobs,
    GpuUse,
    JobGain,
    PeriodKind,
    PolicyOutcome,
    RankHistory,
    RankPoint,
    Report,
    SummaryFigure,
)
from miner.fleet.fleet_file import NO_PRICES, Prices
from miner.notify.notifier import Notifier, ReportNotice
from miner.offers.backtest.replay import PastOffers
from miner.offers.past_offers import OfferFilter
from miner.offers.policies.load import LoadedPolicy
from miner.offers.policies.schema import Policy
from miner.reports.ended_jobs import (
    EndedJob,
    JobQuality,
    completion_rate,
    ended_jobs,
    job_qualities,
    jobs_between,
    mean_hours,
    mean_quality,
    quality_weeks,
    success_by,
    success_rate,
)
from miner.reports.kpis import FIELD_SECONDS, goal_progress, gpu_time, kpis
from miner.reports.money import period_money
from miner.reports.text import as_html, as_markdown
from miner.store.actions import count_actions
from miner.store.alerts import count_alerts
from miner.store.offers import count_offers
from miner.store.ranks import newest_rank, ranks_between, record_sent_report, report_was_sent
from miner.store.store import Store

_DAYS = {PeriodKind.DAILY: 1, PeriodKind.WEEKLY: 7, PeriodKind.MONTHLY: 30}
#: Columns of the occupancy picture for each day.
_COLUMNS = {PeriodKind.DAILY: 24, PeriodKind.WEEKLY: 4, PeriodKind.MONTHLY: 1}
#: Weeks of the quality's trend, jobs whose gain is listed, and points of the rank's history.
_WEEKS, _MAX_GAINS, _MAX_RANKS = 8, 20, 60
FIRST_PLACE = "not known: validators do not publish places"
TOURNAMENTS = "none recorded: validators do not publish them, and no result was entered"
#: The newest offers are replayed: a decision takes some milliseconds, and each policy decides about all.
MAX_REPLAYED_OFFERS = 500
#: Hour (UTC) of the next day from which a report is sent.
REPORT_HOUR = 6


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


def build_report(
    connection: sqlite3.Connection, period: ReportPeriod, policy: Policy, prices: Prices = NO_PRICES
) -> Report:
    """Return the whole report; renderers and the page read it."""
    begins, ends = period.begins_at, period.ends_at
    history = ended_jobs(connection, _history_begins(period, policy), ends)
    jobs = jobs_between(history, begins, ends)
    scores = job_qualities(jobs_between(history, min(begins, ends - FIELD_SECONDS), ends))
    gpus = gpu_time(connection, begins, ends, period.intervals)
    return Report(
        period=period.kind,
        title=period.title,
        begins_at=begins,
        ends_at=ends,
        money=period_money(connection, begins, ends, prices),
        kpis=kpis(connection, ends, policy.targets, history),
        summary=[
            *_money_figures(connection, period, prices),
            *_summary(connection, period, policy, history),
        ],
        jobs=EndedJobs(
            ended=len(jobs),
            states=dict(Counter(job.state.value for job in jobs)),
            reasons=dict(Counter(job.end_reason or "unknown" for job in jobs).most_common()),
        ),
        success=success_by(jobs, policy.success.size),
        gpus=GpuUse(
            measured_hours=gpus.measured_hours,
            used_hours=gpus.used_hours,
            idle_hours=gpus.idle_hours,
            utilization=gpus.utilization,
            utilization_of_jobs=gpus.utilization_of_jobs,
            interval_s=(ends - begins) / period.intervals,
            occupancy={gpu: list(shares) for gpu, shares in (gpus.occupancy or {}).items()},
        ),
        rank=_rank(connection, period),
        gains=_gains(jobs, scores),
        quality=quality_weeks(scores, ends, _WEEKS),
        first_place=FIRST_PLACE,
        tournaments=TOURNAMENTS,
        alerts=count_alerts(connection, begins, ends),
        actions=count_actions(connection, begins, ends),
        goals=goal_progress(connection, ends, policy.targets, history),
        backtest=None,
    )


def redacted_report(report: Report, redact: Callable[[str], str]) -> Report:
    """Remove secrets from all texts of a report."""
    return Report.model_validate(redact_report(report.model_dump(), redact))


def redact_report(value: Any, redact: Callable[[str], str]) -> Any:
    """Remove secrets from all texts of a report, before a renderer's escapes hide them from us."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {redact(str(key)): redact_report(one, redact) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [redact_report(one, redact) for one in value]
    return value


def _history_begins(period: ReportPeriod, policy: Policy) -> float:
    """Jobs are read once: from the earliest that any figure needs."""
    goals = max((goal.within for goal in policy.targets.goals.values()), default=0.0)
    return min(period.before.begins_at, period.before.ends_at - FIELD_SECONDS, period.ends_at - goals)


def _money_figures(
    connection: sqlite3.Connection, period: ReportPeriod, prices: Prices
) -> list[SummaryFigure]:
    now, before = (
        period_money(connection, each.begins_at, each.ends_at, prices) for each in (period, period.before)
    )
    if now is None:
        return []
    titles = {"earned": "Earned", "spent": "Spent on GPUs", "idle": "Of it on idle ones", "kept": "Kept"}
    return [
        SummaryFigure(
            name=name, title=title, unit="dollars", value=getattr(now, name), before=getattr(before, name)
        )
        for name, title in titles.items()
    ]


def _summary(
    connection: sqlite3.Connection, period: ReportPeriod, policy: Policy, history: Sequence[EndedJob]
) -> list[SummaryFigure]:
    now, before = (_numbers(connection, each, policy, history) for each in (period, period.before))
    targets = policy.targets
    rows: list[tuple[str, str, str, float | None, bool]] = [
        ("published", "Published models", "", None, True),
        ("failed", "Failed jobs", "", None, False),
        ("success_rate", "Success rate", "share", targets.success_rate, True),
        ("completion_rate", "Completion rate", "share", targets.completion_rate, True),
        ("penalty_rate", "Penalty rate (no submission)", "share", targets.penalty_rate, False),
        ("first_place_rate", "First-place rate", "share", targets.first_place_rate, True),
        ("tournament_win_rate", "Tournament win rate", "share", targets.tournament_win_rate, True),
        ("mean_hours", "Mean completion", "hours", targets.completion_hours, False),
        ("used_hours", "GPU-hours used", "hours", None, True),
        ("idle_hours", "GPU-hours idle", "hours", None, False),
        ("utilization", "GPU utilisation", "share", targets.utilization, True),
        ("points", "Points, won ones by their chance", "points", None, True),
        ("expected_points", "Points as the decisions expected", "points", None, True),
        ("points_per_gpu_hour", "Points per GPU-hour used", "points", None, True),
        ("expected_per_gpu_hour", "Expected points per GPU-hour", "points", None, True),
        ("quality", "Quality", "points", None, True),
        ("mean_gain", "Mean gain over the base", "share", None, True),
        ("offers", "Offers", "", None, True),
        ("accepted", "Offers accepted", "", None, True),
    ]
    figures = []
    for name, title, unit, target, more_is_better in rows:
        value = now[name]
        met = None
        if target is not None and value is not None:
            met = value >= target if more_is_better else value <= target
        figures.append(
            SummaryFigure(
                name=name,
                title=title,
                unit=unit,
                value=value,
                before=before[name],
                target=target,
                met=met,
            )
        )
    return figures


def _numbers(
    connection: sqlite3.Connection, period: ReportPeriod, policy: Policy, history: Sequence[EndedJob]
) -> dict[str, float | None]:
    begins, ends = period.begins_at, period.ends_at
    field = jobs_between(history, min(begins, ends - FIELD_SECONDS), ends)
    jobs = jobs_between(field, begins, ends)
    gpus = gpu_time(connection, begins, ends)
    completed = completion_rate(jobs)
    points = _total(job.points(policy.value) for job in jobs)
    measured = gpus.measured_hours > 0
    values = [job.value for job in jobs if job.value is not None]
    planned_hours = sum(value.gpu_hours for value in values)
    expected = sum(value.points for value in values) if values else None
    gains = [job.gain for job in jobs if job.published and job.gain is not None]
    offers, accepted = count_offers(connection, begins, ends)
    return {
        "published": sum(job.published for job in jobs),
        "failed": sum(job.state is JobState.FAILED for job in jobs),
        "success_rate": success_rate(jobs),
        "completion_rate": completed,
        "penalty_rate": None if completed is None else 1 - completed,
        "first_place_rate": None,  # FIRST_PLACE, TOURNAMENTS
        "tournament_win_rate": None,
        "mean_hours": mean_hours(jobs),
        "used_hours": gpus.used_hours if measured else None,
        "idle_hours": gpus.idle_hours if measured else None,
        "utilization": gpus.utilization,
        "points": points,
        "expected_points": expected,
        "points_per_gpu_hour": None if points is None or not gpus.used_hours else points / gpus.used_hours,
        "expected_per_gpu_hour": expected / planned_hours if expected and planned_hours else None,
        "quality": mean_quality(job_qualities(field), begins, ends),
        "mean_gain": sum(gains) / len(gains) if gains else None,
        "offers": offers,
        "accepted": accepted,
    }


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _rank(connection: sqlite3.Connection, period: ReportPeriod) -> RankHistory:
    rows = ranks_between(connection, period.begins_at, period.ends_at)
    places = [row.rank for row in rows]
    step = max(-(-len(rows) // _MAX_RANKS), 1)
    thinned = [*rows[:-1:step], rows[-1]] if rows else []
    return RankHistory(
        first=newest_rank(connection, period.begins_at) or (rows[0] if rows else None),
        last=newest_rank(connection, period.ends_at),
        best=min(places, default=None),
        worst=max(places, default=None),
        history=[RankPoint(at=row.at, rank=row.rank, emission=row.emission) for row in thinned],
    )


def _gains(jobs: Sequence[EndedJob], scores: Iterable[JobQuality]) -> list[JobGain]:
    """Base and best score of each job, newest first, with its quality × work."""
    by_job = {score.job_id: score for score in scores}
    rows = []
    for job in reversed(jobs):
        score = by_job.get(job.job_id)
        figures = job.figures
        if figures is None and score is None:
            continue
        rows.append(
            JobGain(
                job_id=job.job_id,
                kind=job.kind,
                model=job.model,
                metric=figures and figures.metric,
                base=figures and figures.base,
                best=figures and figures.best,
                gain=job.gain,
                work=job.work,
                quality=score.quality if score else None,
                final=score.final if score else None,
            )
        )
    return rows[:_MAX_GAINS]


# Other policies


def backtest_policies(
    connection: sqlite3.Connection,
    period: ReportPeriod,
    policies: Sequence[LoadedPolicy],
    profile: LoadedProfile,
    hardware: Hardware,
) -> list[PolicyOutcome]:
    """Replay the offers against each policy; first what was decided. All count by the first one's terms."""
    wanted = OfferFilter(since=period.begins_at, until=period.ends_at, most=MAX_REPLAYED_OFFERS)
    past = PastOffers.read(connection, wanted, period.ends_at)
    if not past.stored:
        return []
    test = past.backtest(profile, hardware, policies[0].terms)
    runs = [past.as_decided(test), *(test.run(policy.name, policy) for policy in policies)]
    return [
        PolicyOutcome(
            name=run.summary.name,
            offers=run.summary.offers,
            accepted=run.summary.accepted,
            points=run.summary.points,
            points_per_gpu_hour=run.summary.per_fleet_hour,
        )
        for run in runs
    ]


# Sending


async def send_due_reports(
    store: Store,
    notifier: Notifier,
    terms: tuple[Policy, Prices],
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
        notice = await store.read(_notice, period, terms, redact)
        # Before it goes out: a daemon that is killed in between sends it never rather than twice.
        await store.write(record_sent_report, name, period.begins_at, now)
        notifier.add_report(notice)


def _notice(
    connection: sqlite3.Connection,
    period: ReportPeriod,
    terms: tuple[Policy, Prices],
    redact: Callable[[str], str],
) -> ReportNotice:
    report = redacted_report(build_report(connection, period, *terms), redact)
    return ReportNotice(period.title, as_markdown(report), as_html(report))
