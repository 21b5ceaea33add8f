"""Some jobs side by side."""

from __future__ import annotations

from pydantic import JsonValue

from miner.api.base import Answer
from miner.api.jobs import AttemptFigures, JobSummary


class ComparedCurve(Answer):
    """Columns of equal length: steps, seconds since the attempt began, and a value."""

    step: list[int]
    seconds: list[float]
    value: list[float | None]


class ComparedJob(Answer):
    """A job, with the attempt that its result is of, or else the newest."""

    job: JobSummary
    #: The profile that its plan is of, or None without a plan.
    profile: str | None
    figures: AttemptFigures
    loss: ComparedCurve
    held_out: ComparedCurve


class PlanRow(Answer):
    """A value of the plan in which the jobs differ; None where a job has none."""

    name: str
    values: list[JsonValue]


def show_value(value: JsonValue) -> str:
    """A plan's value as people write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


class JobComparison(Answer):
    jobs: list[ComparedJob]
    plan: list[PlanRow]
