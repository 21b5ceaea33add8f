"""The five indicators of the page's head, and progress towards the goals of the policy.

Success, mean completion, GPU utilisation, quality and rank: those of the strategy for four H100. Each has a
target from the policy's `targets`; what is not measured is None and neither met nor missed.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from core.domain.job_states import JobState
from core.domain.units import rfc3339
from miner.offers.policies.schema import Goal, PolicyTargets
from miner.reports.ended_jobs import EndedJob, ended_jobs, jobs_between
from miner.reports.gpu_time import GpuTime, gpu_time
from miner.reports.quality import WEEK, job_qualities, mean_quality
from miner.store.ranks import newest_rank
from miner.store.store import Store

DAY = 86_400.0
#: Jobs that form the field in which quality is normalised.
FIELD_SECONDS = 90 * DAY
#: What the quality of the last week is compared with.
_QUALITY_BEFORE_SECONDS = 4 * WEEK
#: The page asks every two seconds; nothing here changes faster than jobs end.
_CACHED_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Kpi:
    name: str
    title: str
    value: float | None
    #: "share", "hours", "" for a plain number.
    unit: str
    target: float | None
    #: None: not known.
    met: bool | None
    detail: str


def success_rate(jobs: Sequence[EndedJob]) -> float | None:
    """Published ones of the jobs that this miner took on; cancelled ones are left out."""
    counted = [job for job in jobs if job.counts]
    return sum(job.published for job in counted) / len(counted) if counted else None


def mean_hours(jobs: Sequence[EndedJob]) -> float | None:
    """From start to end, of published jobs."""
    hours = [job.hours for job in jobs if job.published]
    return fmean(hours) if hours else None


def completion_rate(jobs: Sequence[EndedJob]) -> float | None:
    """Jobs with a submission, of all that ended: the others are penalised."""
    return sum(job.submitted for job in jobs) / len(jobs) if jobs else None


def kpis(
    connection: sqlite3.Connection,
    now: float,
    targets: PolicyTargets,
    history: Sequence[EndedJob] | None = None,
) -> list[Kpi]:
    """The five, for the last seven days; the rank as it is now. `history`: the jobs that ended before, where
    they are read already."""
    if history is None:
        history = ended_jobs(connection, now - FIELD_SECONDS, now)
    field = jobs_between(history, now - FIELD_SECONDS, now)
    jobs = jobs_between(field, now - WEEK, now)
    return [
        _success(jobs, targets),
        _completion(jobs, targets),
        _utilization(gpu_time(connection, now - WEEK, now), targets),
        _quality(field, now),
        _rank(connection, now, targets),
    ]


def _success(jobs: Sequence[EndedJob], targets: PolicyTargets) -> Kpi:
    value, counted = success_rate(jobs), [job for job in jobs if job.counts]
    detail = f"{sum(job.published for job in counted)} of {len(counted)} jobs in 7 days"
    return _at_least("success_rate", "Job success rate", value, targets.success_rate, detail)


def _completion(jobs: Sequence[EndedJob], targets: PolicyTargets) -> Kpi:
    value, target = mean_hours(jobs), targets.completion_hours
    met = None if value is None else value <= target
    detail = f"{sum(job.published for job in jobs)} published jobs in 7 days"
    return Kpi("completion_hours", "Mean completion", value, "hours", target, met, detail)


def _utilization(found: GpuTime, targets: PolicyTargets) -> Kpi:
    detail = "no GPU has been measured"
    if found.used_share is not None and found.measured_hours < 0.1:
        detail = "measured for a few minutes only"
    elif found.used_share is not None:
        digits = 1 if found.measured_hours < 10 else 0
        hours = f"{found.measured_hours:,.{digits}f} GPU-hours"
        detail = f"a job had {found.used_share * 100:.0f} % of {hours} in 7 days"
    return _at_least("gpu_utilization", "GPU utilisation", found.utilization, targets.utilization, detail)


def _quality(field: Sequence[EndedJob], now: float) -> Kpi:
    scores = job_qualities(field)
    value = mean_quality(scores, now - WEEK, now)
    before = mean_quality(scores, now - WEEK - _QUALITY_BEFORE_SECONDS, now - WEEK)
    met = None if value is None or before is None else value >= before
    detail = "no week to compare with" if before is None else f"{before:.2f} in the four weeks before"
    return Kpi("quality", "Quality", value, "", before, met, detail)


def _rank(connection: sqlite3.Connection, now: float, targets: PolicyTargets) -> Kpi:
    last, yesterday = newest_rank(connection, now), newest_rank(connection, now - DAY)
    if last is None:
        return Kpi("rank", "Rank", None, "", None, None, "not registered, or the metagraph was not read yet")
    goal = current_goal(connection, now, targets)
    target = max(int(goal.top * last.miners), 1) if goal and goal.top else None
    detail = f"of {last.miners}"
    if yesterday is not None:
        change = yesterday.rank - last.rank
        way = f"{abs(change)} {'up' if change > 0 else 'down'}" if change else "unchanged"
        detail += f"; {way} in a day"
    met = None if target is None else last.rank <= target
    return Kpi("rank", "Rank", float(last.rank), "", target, met, detail)


def _at_least(name: str, title: str, value: float | None, target: float, detail: str) -> Kpi:
    return Kpi(name, title, value, "share", target, None if value is None else value >= target, detail)


# Goals


@dataclass(frozen=True, slots=True)
class GoalCheck:
    what: str
    value: float | None
    target: float
    met: bool | None


@dataclass(frozen=True, slots=True)
class GoalProgress:
    name: str
    #: None: there was no job yet, from which the time counts.
    due_at: float | None
    checks: tuple[GoalCheck, ...]

    @property
    def met(self) -> bool:
        return all(check.met for check in self.checks)


def first_job_at(connection: sqlite3.Connection) -> float | None:
    found: float | None = connection.execute("SELECT min(started_at) FROM jobs").fetchone()[0]
    return found


def current_goal(connection: sqlite3.Connection, now: float, targets: PolicyTargets) -> Goal | None:
    """The goal that is due next; the last one when all are past."""
    goals = sorted(targets.goals.values(), key=lambda goal: goal.within)
    first = first_job_at(connection)
    age = 0.0 if first is None else now - first
    return next((goal for goal in goals if goal.within > age), goals[-1] if goals else None)


def goal_progress(
    connection: sqlite3.Connection, now: float, targets: PolicyTargets, history: Sequence[EndedJob]
) -> list[GoalProgress]:
    """Every goal with what is reached now, the next due first. `history`: the jobs that ended before."""
    first, last = first_job_at(connection), newest_rank(connection, now)
    published = connection.execute(
        "SELECT count(*) FROM jobs WHERE state = ? AND coalesce(ended_at, updated_at) < ?",
        (JobState.DONE, now),
    ).fetchone()[0]
    result = []
    for name, goal in sorted(targets.goals.items(), key=lambda item: item[1].within):
        checks = []
        if goal.jobs is not None:
            checks.append(GoalCheck("jobs", published, goal.jobs, published >= goal.jobs))
        if goal.top is not None:
            top = None if last is None else last.share
            checks.append(GoalCheck("top", top, goal.top, None if top is None else top <= goal.top))
        if goal.success_rate is not None:
            rate = success_rate(jobs_between(history, now - goal.within, now))
            met = None if rate is None else rate >= goal.success_rate
            checks.append(GoalCheck("success_rate", rate, goal.success_rate, met))
        result.append(GoalProgress(name, None if first is None else first + goal.within, tuple(checks)))
    return result


def goal_text(goal: GoalProgress) -> str:
    """One line: `jobs 10 (goal 10); rank in the best 12% (goal 20%), due 2026-12-07`."""
    words = {"jobs": "jobs", "top": "rank in the best", "success_rate": "success"}
    parts = []
    for check in goal.checks:
        form = "{:.0f}" if check.what == "jobs" else "{:.0%}"
        value = "not known" if check.value is None else form.format(check.value)
        parts.append(f"{words[check.what]} {value} (goal {form.format(check.target)})")
    due = "" if goal.due_at is None else f", due {rfc3339(goal.due_at)[:10]}"
    return "; ".join(parts) + due


class CurrentKpis:
    """The indicators for the page, read off the event loop and kept for half a minute."""

    def __init__(
        self, store: Store, targets: Callable[[], PolicyTargets], clock: Callable[[], float] = time.time
    ) -> None:
        self._store, self._targets, self._clock = store, targets, clock
        self._read_at = float("-inf")
        self._found: list[dict[str, Any]] = []
        self._lock = asyncio.Lock()

    async def read(self) -> list[dict[str, Any]]:
        async with self._lock:
            now = self._clock()
            if not 0 <= now - self._read_at < _CACHED_SECONDS:
                found = await self._store.read(kpis, now, self._targets())
                self._found, self._read_at = [asdict(kpi) for kpi in found], now
            return self._found
