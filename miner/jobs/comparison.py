"""Compare jobs: curves, scores, plans and costs."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from core.planning.plan import TrainingPlan
from core.recipes.dry_run import flatten
from miner.api.comparison import ComparedCurve, ComparedJob, JobComparison, PlanRow
from miner.api.jobs import AttemptFigures, LiveJob
from miner.fleet.costs import GpuCosts
from miner.jobs.figures import FiguresSnapshot
from miner.jobs.folder import AttemptFolder
from miner.jobs.history import read_plan
from miner.jobs.views import job_summary, measured
from miner.store.attempts import AttemptRow, attempts_of, figures_of
from miner.store.jobs import JobRow

#: Jobs that can be told apart in one chart.
MOST_JOBS = 6
#: Points of one curve: of more steps the means of equal parts, as extremes of several jobs hide each other.
_POINTS = 250
#: Values that follow from the model and the rows.
_LEFT_OUT = ("adapter.params", "adapter.rank_pattern", "sequence.per_epoch", "sequence.tokens_per_epoch")
#: Parts of a plan in which trainings are compared; what follows from them is left out.
_PARTS = (
    *("gpus", "engine", "method", "parallelism", "adapter", "batch", "sequence", "optimizer", "steps"),
    *("precision", "lr_search", "ema", "dpo", "grpo", "image"),
)


def compare_jobs(
    db: sqlite3.Connection,
    rows: Sequence[JobRow],
    costs: GpuCosts,
    live: Mapping[int, LiveJob],
    running: Mapping[int, FiguresSnapshot],
) -> JobComparison:
    """Put some jobs side by side. `live` and `running`: of those that a worker has."""
    jobs, plans = [], []
    for row in {row.id: row for row in rows}.values():  # one may be named by number and by task id
        summary = job_summary(db, row, live.get(row.id), costs)
        attempts = attempts_of(db, row.id)
        chosen = summary.result.attempt if summary.result else None
        attempt = next((one for one in attempts if one.number == chosen), attempts[-1] if attempts else None)
        plans.append(read_plan(AttemptFolder(attempt.folder)) if attempt else None)
        snapshot = _snapshot(db, attempt, running.get(row.id))
        figures = snapshot.figures if snapshot else AttemptFigures()
        curves = snapshot.curves if snapshot else {}
        began = attempt.started_at if attempt else 0.0
        evals, steps = curves.get("evals", []), curves.get("steps", {})
        held_out = {name: [one[name] for one in evals] for name in ("step", "t", "score")}
        jobs.append(
            ComparedJob(
                job=summary,
                profile=plans[-1].profile.name if plans[-1] else None,
                figures=figures,
                loss=_curve(steps, "loss", began),
                held_out=_curve(held_out, "score", began),
            )
        )
    return JobComparison(jobs=jobs, plan=_plan_rows(plans))


def _snapshot(
    db: sqlite3.Connection, attempt: AttemptRow | None, running: FiguresSnapshot | None
) -> FiguresSnapshot | None:
    if attempt is None:
        return None
    stored = figures_of(db, attempt.job_id).get(attempt.id)
    return FiguresSnapshot.from_stored(measured(attempt, stored, running))


def _curve(columns: Mapping[str, list[Any]], name: str, began: float) -> ComparedCurve:
    steps, times, values = (columns.get(one) or [] for one in ("step", "t", name))
    parts = min(len(steps), _POINTS)
    edges = [len(steps) * part // parts for part in range(parts + 1)] if parts else []
    means = []
    for begin, end in pairwise(edges):
        known = [value for value in values[begin:end] if value is not None]
        means.append(float(f"{fmean(known):.6g}") if known else None)
    return ComparedCurve(
        step=[steps[end - 1] for end in edges[1:]],
        seconds=[round(times[end - 1] - began, 1) for end in edges[1:]],
        value=means,
    )


def _plan_rows(plans: Sequence[TrainingPlan | None]) -> list[PlanRow]:
    """The values in which plans differ; a job without a plan tells nothing."""
    flat = [_plan_values(plan) if plan else None for plan in plans]
    known = [values for values in flat if values is not None]
    names = dict.fromkeys(name for values in known for name in values)
    return [
        PlanRow(name=name, values=[None if values is None else values.get(name) for values in flat])
        for name in names
        if any(values.get(name) != known[0].get(name) for values in known)
    ]


def _plan_values(plan: TrainingPlan) -> dict[str, Any]:
    parts = plan.model_dump(mode="json", include=set(_PARTS))
    flat = flatten({name: parts[name] for name in _PARTS} | {"gpus": str(plan.gpus)})
    return {name: value for name, value in flat.items() if name not in _LEFT_OUT}
