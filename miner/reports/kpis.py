"""The five indicators of the page's head, and progress towards the goals of the policy.

Success, mean completion, GPU utilisation, quality and rank: those of the strategy for four H100. Each has a
target from the policy's `targets`; what is not measured is None and neither met nor missed.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from core.domain.units import rfc3339
from miner.api.reports import GoalCheck, GoalProgress, Kpi
from miner.api.samples import GpuRollup
from miner.offers.policies.schema import Goal, PolicyTargets
from miner.reports.ended_jobs import (
    WEEK,
    EndedJob,
    ended_jobs,
    job_qualities,
    jobs_between,
    mean_hours,
    mean_quality,
    success_rate,
)
from miner.store.jobs import count_published, first_start
from miner.store.ranks import newest_rank
from miner.store.samples import HOUR, MINUTE, rollups

DAY = 86_400.0
#: Jobs that form the field in which quality is normalised.
FIELD_SECONDS = 90 * DAY
#: Time before the last week with whose quality it is compared.
_QUALITY_BEFORE_SECONDS = 4 * WEEK


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
    return Kpi(
        name="completion_hours",
        title="Mean completion",
        value=value,
        unit="hours",
        target=target,
        met=met,
        detail=detail,
    )


def _utilization(gpus: GpuTime, targets: PolicyTargets) -> Kpi:
    detail = "no GPU has been measured"
    if gpus.used_share is not None and gpus.measured_hours < 0.1:
        detail = "measured for a few minutes only"
    elif gpus.used_share is not None:
        digits = 1 if gpus.measured_hours < 10 else 0
        hours = f"{gpus.measured_hours:,.{digits}f} GPU-hours"
        detail = f"a job had {gpus.used_share * 100:.0f} % of {hours} in 7 days"
    return _at_least("gpu_utilization", "GPU utilisation", gpus.utilization, targets.utilization, detail)


def _quality(field: Sequence[EndedJob], now: float) -> Kpi:
    scores = job_qualities(field)
    value = mean_quality(scores, now - WEEK, now)
    before = mean_quality(scores, now - WEEK - _QUALITY_BEFORE_SECONDS, now - WEEK)
    met = None if value is None or before is None else value >= before
    detail = "no week to compare with" if before is None else f"{before:.2f} in the four weeks before"
    return Kpi(
        name="quality",
        title="Quality",
        value=value,
        unit="",
        target=before,
        met=met,
        detail=detail,
    )


def _rank(connection: sqlite3.Connection, now: float, targets: PolicyTargets) -> Kpi:
    last, yesterday = newest_rank(connection, now), newest_rank(connection, now - DAY)
    if last is None:
        detail = "not registered, or the metagraph was not read yet"
        return Kpi(name="rank", title="Rank", value=None, unit="", target=None, met=None, detail=detail)
    goal = current_goal(connection, now, targets)
    target = max(int(goal.top * last.miners), 1) if goal and goal.top else None
    detail = f"of {last.miners}"
    if yesterday is not None:
        change = yesterday.rank - last.rank
        way = f"{abs(change)} {'up' if change > 0 else 'down'}" if change else "unchanged"
        detail += f"; {way} in a day"
    met = None if target is None else last.rank <= target
    return Kpi(
        name="rank",
        title="Rank",
        value=float(last.rank),
        unit="",
        target=target,
        met=met,
        detail=detail,
    )


def _at_least(name: str, title: str, value: float | None, target: float, detail: str) -> Kpi:
    met = None if value is None else value >= target
    return Kpi(name=name, title=title, value=value, unit="share", target=target, met=met, detail=detail)


# GPU time


@dataclass(frozen=True, slots=True)
class GpuTime:
    """Hours of the GPUs in a time. Only measured ones count: a daemon that is down measures none."""

    begins_at: float
    ends_at: float
    measured_hours: float = 0.0
    used_hours: float = 0.0
    #: Mean share of the time in which a kernel ran, or None if no GPU reports it.
    utilization: float | None = None
    #: The same while a job had the GPU.
    utilization_of_jobs: float | None = None
    #: By GPU, the share of each interval in which a job had it, or None if it was not measured.
    occupancy: dict[str, tuple[float | None, ...]] | None = None

    @property
    def idle_hours(self) -> float:
        return self.measured_hours - self.used_hours

    @property
    def used_share(self) -> float | None:
        return self.used_hours / self.measured_hours if self.measured_hours else None


def gpu_time(
    connection: sqlite3.Connection, begins_at: float, ends_at: float, intervals: int = 24
) -> GpuTime:
    """Add up the roll-ups of a time. `intervals`: of the occupancy, of equal length."""
    measured = used = kernels = measured_kernels = job_kernels = job_hours = 0.0
    length = (ends_at - begins_at) / intervals
    cells: dict[str, list[list[float]]] = {}
    for row in rollups_within(connection, begins_at, ends_at):
        hours = row.period / HOUR
        measured += row.watched * hours
        used += row.busy * hours
        if row.utilization is not None:
            measured_kernels += row.watched * hours
            kernels += row.utilization * row.watched * hours
            if row.busy > 0:  # kernels run for jobs; the rest of such a period is next to nothing
                job_hours += row.busy * hours
                job_kernels += min(row.utilization * row.watched, row.busy) * hours
        of_gpu = cells.setdefault(row.gpu, [[0.0, 0.0] for _ in range(intervals)])
        cell = of_gpu[min(int((row.at - begins_at) / length), intervals - 1)]
        cell[0] += row.watched * hours
        cell[1] += row.busy * hours
    occupancy = {
        gpu: tuple(busy / hours if hours else None for hours, busy in of_gpu)
        for gpu, of_gpu in sorted(cells.items())
    }
    return GpuTime(
        begins_at,
        ends_at,
        measured,
        used,
        kernels / measured_kernels if measured_kernels else None,
        job_kernels / job_hours if job_hours else None,
        occupancy or None,
    )


def rollups_within(connection: sqlite3.Connection, begins_at: float, ends_at: float) -> Iterator[GpuRollup]:
    """Whole hours, and minutes before the first and after the last of them. Each minute has its hour."""
    first_hour, last_hour = -(-begins_at // HOUR) * HOUR, ends_at // HOUR * HOUR
    last_minute = math.floor(ends_at - MINUTE) + 1
    yield from rollups(connection, HOUR, begins_at, math.floor(ends_at - HOUR) + 1)
    yield from rollups(connection, MINUTE, begins_at, min(first_hour, last_minute))
    yield from rollups(connection, MINUTE, max(first_hour, last_hour), last_minute)


# Goals


def current_goal(connection: sqlite3.Connection, now: float, targets: PolicyTargets) -> Goal | None:
    """The goal that is due next; the last one when all are past."""
    goals = sorted(targets.goals.values(), key=attrgetter("within"))
    first = first_start(connection)
    age = 0.0 if first is None else now - first
    return next((goal for goal in goals if goal.within > age), goals[-1] if goals else None)


def goal_progress(
    connection: sqlite3.Connection, now: float, targets: PolicyTargets, history: Sequence[EndedJob]
) -> list[GoalProgress]:
    """Every goal with what is reached now, the next due first. `history`: the jobs that ended before."""
    first, last = first_start(connection), newest_rank(connection, now)
    published = count_published(connection, now)
    result = []
    for name, goal in sorted(targets.goals.items(), key=_due):
        checks = []
        if goal.jobs is not None:
            checks.append(_check("jobs", published, goal.jobs, published >= goal.jobs))
        if goal.top is not None:
            top = None if last is None else last.share
            checks.append(_check("top", top, goal.top, None if top is None else top <= goal.top))
        if goal.success_rate is not None:
            rate = success_rate(jobs_between(history, now - goal.within, now))
            met = None if rate is None else rate >= goal.success_rate
            checks.append(_check("success_rate", rate, goal.success_rate, met))
        due_at = None if first is None else first + goal.within
        result.append(
            GoalProgress(
                name=name,
                due_at=due_at,
                checks=checks,
                met=all(check.met for check in checks),
                text=_goal_text(checks, due_at),
            )
        )
    return result


def _due(named: tuple[str, Goal]) -> float:
    return named[1].within


def _check(what: str, value: float | None, target: float, met: bool | None) -> GoalCheck:
    return GoalCheck(what=what, value=value, target=target, met=met)


def _goal_text(checks: Sequence[GoalCheck], due_at: float | None) -> str:
    """One line: `jobs 10 (goal 10); rank in the best 12% (goal 20%), due 2026-12-07`."""
    words = {"jobs": "jobs", "top": "rank in the best", "success_rate": "success"}
    parts = []
    for check in checks:
        form = "{:.0f}" if check.what == "jobs" else "{:.0%}"
        value = "not known" if check.value is None else form.format(check.value)
        parts.append(f"{words[check.what]} {value} (goal {form.format(check.target)})")
    due = "" if due_at is None else f", due {rfc3339(due_at)[:10]}"
    return "; ".join(parts) + due
