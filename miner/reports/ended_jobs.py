"""Jobs that have ended, with what reports need of each: how, when, what it was worth, what it gained."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from core.domain.decisions import ExpectedValue
from core.domain.job_states import JobState
from core.models.facts import Family
from miner.offers.decide import work_score
from miner.offers.history import job_outcomes
from miner.offers.policies.schema import ValueTerms
from miner.store.offers import read_part

#: What validators count at most.
_MOST_BILLIONS = 40

_ENDED = f"""
SELECT jobs.id, jobs.task_type, jobs.model, jobs.hours, jobs.state, jobs.end_reason, jobs.started_at,
    coalesce(jobs.ended_at, jobs.updated_at) AS ended, jobs.submission_repo IS NOT NULL AS submitted,
    coalesce(own.details, offered.details) AS details
FROM jobs
LEFT JOIN decisions AS own ON own.id = (SELECT max(id) FROM decisions WHERE job_id = jobs.id)
LEFT JOIN offers ON offers.validator = jobs.validator AND offers.task_id = jobs.task_id
LEFT JOIN decisions AS offered ON offered.id = offers.decision_id
WHERE jobs.state IN ('{JobState.DONE}', '{JobState.FAILED}', '{JobState.CANCELLED}')
    AND ended >= ? AND ended < ?
ORDER BY ended
"""  # noqa: S608 - our enums
_FIGURES = """
SELECT attempts.job_id, attempt_figures.figures FROM attempt_figures
JOIN attempts ON attempts.id = attempt_figures.attempt_id
JOIN jobs ON jobs.id = attempts.job_id
WHERE coalesce(jobs.ended_at, jobs.updated_at) >= ? AND coalesce(jobs.ended_at, jobs.updated_at) < ?
"""


@dataclass(frozen=True, slots=True)
class EndedJob:
    job_id: int
    model: str
    #: The most exact name that policies have for it: `instruct`, `flux`.
    kind: str
    family: Family | None
    params: int | None
    state: JobState
    end_reason: str | None
    started_at: float
    ended_at: float
    submitted: bool
    #: Whether its end says something about this miner: not cancelled, and not refused and infeasible.
    counts: bool
    #: The validators' weight of the task.
    work: float
    #: As the decision expected it; None: nothing was decided about it.
    value: ExpectedValue | None
    #: Of the attempt that gained most: `base`, `best`, `metric`, `gain`.
    figures: dict[str, Any]

    @property
    def published(self) -> bool:
        return self.state is JobState.DONE

    @property
    def is_failure(self) -> bool:
        return self.counts and not self.published

    @property
    def hours(self) -> float:
        return max(self.ended_at - self.started_at, 0.0) / 3600

    @property
    def gain(self) -> float | None:
        """The relative improvement over the base model; None: not measured."""
        gain = self.figures.get("gain")
        return float(gain) if isinstance(gain, int | float) else None

    def points(self, terms: ValueTerms) -> float | None:
        """The validators' points for what came of it. A model counts by its chance to win: nobody learns
        who won. None: there is no decision to take that from, or the end does not count."""
        if not self.counts:
            return None
        if not self.published:
            return -self.work * terms.penalty
        if self.value is None:
            return None
        return self.work * (terms.win_points * self.value.win - terms.penalty * self.value.punished)


def ended_jobs(connection: sqlite3.Connection, begins_at: float, ends_at: float) -> list[EndedJob]:
    """Return the jobs that ended in a time, in the order of their ends."""
    outcomes = {outcome.job_id: outcome for outcome in job_outcomes(connection, ends_at, since=begins_at)}
    figures = _best_figures(connection, begins_at, ends_at)
    jobs = []
    for row in connection.execute(_ENDED, (begins_at, ends_at)):
        outcome = outcomes.get(row["id"])
        value = _value(row["details"])
        params = outcome.params if outcome else None
        billions = min(max((params or 0) // 10**9, 1), _MOST_BILLIONS)
        jobs.append(
            EndedJob(
                job_id=row["id"],
                model=row["model"],
                kind=outcome.kind if outcome else row["task_type"],
                family=outcome.family if outcome else None,
                params=params,
                state=JobState(row["state"]),
                end_reason=row["end_reason"],
                started_at=row["started_at"],
                ended_at=row["ended"],
                submitted=bool(row["submitted"]),
                counts=outcome is not None,
                work=value.work if value else work_score(row["hours"], billions),
                value=value,
                figures=figures.get(row["id"], {}),
            )
        )
    return jobs


def jobs_between(jobs: Iterable[EndedJob], begins_at: float, ends_at: float) -> list[EndedJob]:
    return [job for job in jobs if begins_at <= job.ended_at < ends_at]


def _value(details: str | None) -> ExpectedValue | None:
    value = json.loads(details).get("value") if details else None
    return read_part(ExpectedValue, value) if value else None


def _best_figures(
    connection: sqlite3.Connection, begins_at: float, ends_at: float
) -> dict[int, dict[str, Any]]:
    """By job, the figures of the attempt that gained most."""
    best: dict[int, dict[str, Any]] = {}
    for job_id, text in connection.execute(_FIGURES, (begins_at, ends_at)):
        figures = json.loads(text)
        known = best.get(job_id)
        if known is None or _gain(figures) > _gain(known):
            best[job_id] = figures
    return best


def _gain(figures: dict[str, Any]) -> float:
    gain = figures.get("gain")
    return float("-inf") if gain is None else float(gain)
