"""Jobs that have ended: how, when, what each was worth and what it gained; their success and quality.

Quality × work is a score for own jobs, normalised as validators normalise miners.

Theirs: a task's work is max(1, 2·√(hours·billions)); the winner of a task gets 3, a miner without a valid
submission −1; what all tasks of a miner bring, divided by the best miner's, is normalised by a sigmoid and a
linear part. Ours, because no miner learns its place: the same normalisation for the gain over the base, in
a field of own jobs. docs/reports.md says so to the operator.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from core.domain.decisions import ExpectedValue
from core.domain.job_states import JobState
from core.domain.selectors import SizeBand
from core.models.facts import Family
from miner.api.jobs import AttemptFigures
from miner.api.reports import QualityWeek, SuccessFigures, SuccessRow, SuccessTables
from miner.offers.decide import work_score
from miner.offers.history import job_outcomes
from miner.offers.policies.schema import ValueTerms
from miner.store.attempts import figures_of_ended
from miner.store.offers import read_part

#: Most parameters, in billions, that validators count.
_MOST_BILLIONS = 40

#: The validators' normalisation: share, steepness, middle and exponent of the sigmoid; the linear share.
_SIGMOID_SHARE, _STEEPNESS, _MIDDLE, _EXPONENT, _LINEAR_SHARE = 0.7, 9.0, 0.5, 0.75, 0.05
#: A task without a valid submission.
_FAILED = -1.0
WEEK = 7 * 86_400.0
_NOT_KNOWN = "not known"

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
    #: True if its end tells something about this miner: not cancelled, and not refused and infeasible.
    counts: bool
    #: The validators' weight of the task.
    work: float
    #: As the decision expected it, or None if there was no decision.
    value: ExpectedValue | None
    #: Those of the attempt that gained most.
    figures: AttemptFigures | None

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
        """The relative improvement over the base model, or None if it was not measured."""
        return self.figures.gain if self.figures else None

    def points(self, terms: ValueTerms) -> float | None:
        """The validators' points for its result, or None if the end does not count or there is no decision
        with the chances. A model counts by its chance to win: nobody learns who won."""
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
                figures=figures.get(row["id"]),
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
) -> dict[int, AttemptFigures]:
    """Return the figures of the attempt that gained most, by job."""
    best: dict[int, AttemptFigures] = {}
    for attempt in figures_of_ended(connection, begins_at, ends_at):
        known = best.get(attempt.job_id)
        if known is None or _gain(attempt.figures) > _gain(known):
            best[attempt.job_id] = attempt.figures
    return best


def _gain(figures: AttemptFigures) -> float:
    return -math.inf if figures.gain is None else figures.gain


# Success


def success_rate(jobs: Sequence[EndedJob]) -> float | None:
    """Share of published jobs among those that this miner took on, without cancelled ones."""
    counted = [job for job in jobs if job.counts]
    return sum(job.published for job in counted) / len(counted) if counted else None


def mean_hours(jobs: Sequence[EndedJob]) -> float | None:
    """Mean hours from start to end of published jobs."""
    hours = [job.hours for job in jobs if job.published]
    return fmean(hours) if hours else None


def completion_rate(jobs: Sequence[EndedJob]) -> float | None:
    """Share of jobs with a submission among all that ended: the others are penalised."""
    return sum(job.submitted for job in jobs) / len(jobs) if jobs else None


def success_by(jobs: Sequence[EndedJob], sizes: Iterable[SizeBand]) -> SuccessTables:
    """Success by kind of task, family and size (the bands `sizes`), groups with the most jobs first."""
    bands = list(sizes)

    groups: dict[str, dict[str, list[EndedJob]]] = {"type": {}, "family": {}, "size": {}}
    for job in jobs:
        if job.counts:
            family = job.family.value if job.family else _NOT_KNOWN
            size = next((str(band) for band in bands if job.params in band), _NOT_KNOWN)
            for what, name in (("type", job.kind), ("family", family), ("size", size)):
                groups[what].setdefault(name, []).append(job)
    return SuccessTables(**{what: _rows(named) for what, named in groups.items()})


def _rows(groups: Mapping[str, Sequence[EndedJob]]) -> list[SuccessRow]:
    rows = [SuccessRow(name=key, **dict(success_of(group))) for key, group in groups.items()]
    return sorted(rows, key=lambda row: (-row.jobs, row.name))


def success_of(jobs: Sequence[EndedJob]) -> SuccessFigures:
    gains = [job.gain for job in jobs if job.gain is not None]
    return SuccessFigures(
        jobs=sum(job.counts for job in jobs),
        published=sum(job.published for job in jobs),
        rate=success_rate(jobs),
        mean_hours=mean_hours(jobs),
        mean_gain=fmean(gains) if gains else None,
    )


# Quality


@dataclass(frozen=True, slots=True)
class JobQuality:
    job_id: int
    ended_at: float
    #: From 0 to 1 by the gain over the base; −1 without a submission.
    quality: float
    work: float

    @property
    def final(self) -> float:
        return self.quality * self.work


def normalised(share: float) -> float:
    """The validators' normalisation of a share of the best, scaled so that the best has 1."""
    return _raw(min(max(share, 0.0), 1.0)) / _raw(1.0)


def _raw(share: float) -> float:
    sigmoid = 1 / (1 + math.exp(-_STEEPNESS * (share - _MIDDLE)))
    return float(_SIGMOID_SHARE * sigmoid**_EXPONENT + _LINEAR_SHARE * share)


def job_qualities(jobs: Iterable[EndedJob]) -> list[JobQuality]:
    """Score every job of which something is known, each in the field of all that are given of its kind.
    Cancelled jobs, and models published without a measured gain, have no score."""
    jobs = list(jobs)
    best: dict[str, float] = {}
    for job in jobs:
        if job.published and job.gain is not None:
            best[job.kind] = max(best.get(job.kind, 0.0), job.gain)
    scores = []
    for job in jobs:
        if job.is_failure:
            scores.append(JobQuality(job.job_id, job.ended_at, _FAILED, job.work))
        elif job.published and job.gain is not None:
            share = job.gain / best[job.kind] if best[job.kind] > 0 else 0.0
            scores.append(JobQuality(job.job_id, job.ended_at, normalised(share), job.work))
    return scores


def mean_quality(scores: Sequence[JobQuality], begins_at: float, ends_at: float) -> float | None:
    qualities = [score.quality for score in scores if begins_at <= score.ended_at < ends_at]
    return fmean(qualities) if qualities else None


def quality_weeks(scores: Sequence[JobQuality], ends_at: float, weeks: int) -> list[QualityWeek]:
    """The weeks before a moment, oldest first."""
    result = []
    for index in range(weeks, 0, -1):
        begins_at = ends_at - index * WEEK
        of_week = [score for score in scores if begins_at <= score.ended_at < begins_at + WEEK]
        mean = mean_quality(of_week, begins_at, begins_at + WEEK)
        final = sum(score.final for score in of_week)
        result.append(QualityWeek(begins_at=begins_at, jobs=len(of_week), quality=mean, final=final))
    return result
