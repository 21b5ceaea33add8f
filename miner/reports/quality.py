"""Quality × work: a score for own jobs, normalised as validators normalise miners.

Theirs: a task's work is max(1, 2·√(hours·billions)); the winner of a task gets 3, a miner without a valid
submission −1; what all tasks of a miner bring, divided by the best miner's, is normalised by a sigmoid and a
linear part. Ours, because no miner learns its place: the same normalisation for the gain over the base, in
a field of own jobs. docs/reports.md says so to the operator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from miner.reports.ended_jobs import EndedJob

#: The validators' normalisation: share, steepness, middle and exponent of the sigmoid; the linear share.
_SIGMOID_SHARE, _STEEPNESS, _MIDDLE, _EXPONENT, _LINEAR_SHARE = 0.7, 9.0, 0.5, 0.75, 0.05
#: A task without a valid submission.
_FAILED = -1.0
WEEK = 7 * 86_400.0


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


@dataclass(frozen=True, slots=True)
class QualityWeek:
    begins_at: float
    jobs: int
    #: None: no job of that week has a score.
    quality: float | None
    final: float


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
    found = [score.quality for score in scores if begins_at <= score.ended_at < ends_at]
    return fmean(found) if found else None


def quality_weeks(scores: Sequence[JobQuality], ends_at: float, weeks: int) -> list[QualityWeek]:
    """The weeks before a moment, oldest first."""
    result = []
    for index in range(weeks, 0, -1):
        begins_at = ends_at - index * WEEK
        found = [score for score in scores if begins_at <= score.ended_at < begins_at + WEEK]
        mean = mean_quality(found, begins_at, begins_at + WEEK)
        result.append(QualityWeek(begins_at, len(found), mean, sum(score.final for score in found)))
    return result
