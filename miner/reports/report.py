"""Build a report from the store: what was done in a day, a week or a month, what it was worth, and how it
compares with the time before and with the policy's goals.

Pure: the same rows give the same report. It takes a read connection and a fraction of a second; the daemon
builds it in a thread.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from core.domain.job_states import JobState
from miner.offers.policies.schema import Policy
from miner.reports.ended_jobs import EndedJob, ended_jobs, jobs_between
from miner.reports.gpu_time import gpu_time
from miner.reports.kpis import (
    FIELD_SECONDS,
    completion_rate,
    goal_progress,
    goal_text,
    kpis,
    mean_hours,
    success_rate,
)
from miner.reports.periods import ReportPeriod
from miner.reports.quality import job_qualities, mean_quality, quality_weeks
from miner.reports.success import success_by
from miner.store.ranks import newest_rank, ranks_between

#: Weeks of the quality's trend, jobs whose gain is listed, and points of the rank's history.
_WEEKS, _MAX_GAINS, _MAX_RANKS = 8, 20, 60
FIRST_PLACE = "not known: validators do not publish places"
TOURNAMENTS = "none recorded: validators do not publish them, and no result was entered"

_ALERTS = """
SELECT rule,
    CASE WHEN max(severity = 'critical') THEN 'critical'
        WHEN max(severity = 'warning') THEN 'warning' ELSE 'info' END AS severity,
    count(*) AS raised, sum(times) AS times,
    sum(resolved_at IS NULL) AS still_open, max(text) AS example
FROM alerts WHERE raised_at >= ? AND raised_at < ? GROUP BY rule ORDER BY raised DESC, rule
"""
_ACTIONS = """
SELECT rule, kind, outcome, count(*) AS count FROM actions
WHERE asked_at >= ? AND asked_at < ? GROUP BY rule, kind, outcome ORDER BY count DESC, rule, outcome
"""
_OFFERS = """
SELECT count(*), coalesce(sum(decisions.accepted), 0) FROM offers
JOIN decisions ON decisions.id = offers.decision_id WHERE offers.received_at >= ? AND offers.received_at < ?
"""


@dataclass(frozen=True, slots=True)
class SummaryFigure:
    """One number of the summary, with what it was before and its target."""

    name: str
    title: str
    #: "share", "hours", "points", "" for a count.
    unit: str
    value: float | None
    before: float | None = None
    target: float | None = None
    #: None: there is no target, or nothing to compare with it.
    met: bool | None = None


def build_report(connection: sqlite3.Connection, period: ReportPeriod, policy: Policy) -> dict[str, Any]:
    """Return the whole report as JSON; renderers and the page read it."""
    begins, ends = period.begins_at, period.ends_at
    history = ended_jobs(connection, _history_begins(period, policy), ends)
    jobs = jobs_between(history, begins, ends)
    scores = job_qualities(jobs_between(history, min(begins, ends - FIELD_SECONDS), ends))
    gpus = gpu_time(connection, begins, ends, period.intervals)
    return {
        "period": period.kind.value,
        "title": period.title,
        "begins_at": begins,
        "ends_at": ends,
        "kpis": [asdict(kpi) for kpi in kpis(connection, ends, policy.targets, history)],
        "summary": [asdict(figure) for figure in _summary(connection, period, policy, history)],
        "jobs": {
            "ended": len(jobs),
            "states": dict(Counter(job.state.value for job in jobs)),
            "reasons": dict(Counter(job.end_reason or "unknown" for job in jobs).most_common()),
        },
        "success": success_by(jobs, policy.success.size),
        "gpus": {
            "measured_hours": gpus.measured_hours,
            "used_hours": gpus.used_hours,
            "idle_hours": gpus.idle_hours,
            "utilization": gpus.utilization,
            "utilization_of_jobs": gpus.utilization_of_jobs,
            "interval_s": (ends - begins) / period.intervals,
            "occupancy": gpus.occupancy or {},
        },
        "rank": _rank(connection, period),
        "gains": _gains(jobs, scores),
        "quality": [asdict(week) for week in quality_weeks(scores, ends, _WEEKS)],
        "first_place": FIRST_PLACE,
        "tournaments": TOURNAMENTS,
        "alerts": _rows(connection.execute(_ALERTS, (begins, ends))),
        "actions": _rows(connection.execute(_ACTIONS, (begins, ends))),
        "goals": [
            {**asdict(goal), "met": goal.met, "text": goal_text(goal)}
            for goal in goal_progress(connection, ends, policy.targets, history)
        ],
        "backtest": None,
    }


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
        figures.append(SummaryFigure(name, title, unit, value, before[name], target, met))
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
    offers, accepted = connection.execute(_OFFERS, (begins, ends)).fetchone()
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


def _rank(connection: sqlite3.Connection, period: ReportPeriod) -> dict[str, Any]:
    rows = ranks_between(connection, period.begins_at, period.ends_at)
    first = newest_rank(connection, period.begins_at) or (rows[0] if rows else None)
    last = newest_rank(connection, period.ends_at)
    places = [row.rank for row in rows]
    step = max(-(-len(rows) // _MAX_RANKS), 1)
    thinned = [*rows[:-1:step], rows[-1]] if rows else []
    return {
        "first": first and asdict(first),
        "last": last and asdict(last),
        "best": min(places, default=None),
        "worst": max(places, default=None),
        "history": [{"at": row.at, "rank": row.rank, "emission": row.emission} for row in thinned],
    }


def _gains(jobs: Sequence[EndedJob], scores: Iterable[Any]) -> list[dict[str, Any]]:
    """Base and best score of each job, newest first, with its quality × work."""
    by_job = {score.job_id: score for score in scores}
    rows = []
    for job in reversed(jobs):
        score = by_job.get(job.job_id)
        if not job.figures and score is None:
            continue
        rows.append(
            {
                "job_id": job.job_id,
                "kind": job.kind,
                "model": job.model,
                "metric": job.figures.get("metric"),
                "base": job.figures.get("base"),
                "best": job.figures.get("best"),
                "gain": job.gain,
                "work": job.work,
                "quality": score.quality if score else None,
                "final": score.final if score else None,
            }
        )
    return rows[:_MAX_GAINS]


def _rows(cursor: sqlite3.Cursor) -> list[dict[str, Any]]:
    return [dict(row) for row in cursor]
