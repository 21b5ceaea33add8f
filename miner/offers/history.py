"""Learn the chances of success from jobs that have ended, which are read from the store.

A policy's prior counts as `prior_weight` jobs; own jobs are added to it, each weighing less
the older it is (`half_life`). One lucky job moves little, a hundred outweigh the prior. The decaying
sums are kept up to date one job at a time: a decision adds up nothing.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from core.domain.job_states import EndReason, JobState
from core.domain.selectors import SizeBand
from core.domain.tasks import ImageModelType, TaskType
from core.models.facts import Family
from core.models.identify import image_model_facts
from core.models.image_families import image_type_from_name
from core.models.names import family_from_name
from miner.offers.parsed_offer import estimate_size, task_kinds
from miner.offers.policies.schema import SuccessTerms, by_kind
from miner.store.store import Store

#: Totals that are kept at once: for the policy in force, and for one or two that are compared with it.
_MAX_TOTALS = 4


class JobOutcome(NamedTuple):
    """A job that has ended. Cancelled ones say nothing about our chances and are left out."""

    job_id: int
    task_type: TaskType
    #: The most exact name that policies have for it: `instruct`, `flux`.
    kind: str
    family: Family
    #: None if unknown.
    params: int | None
    published: bool
    ended_at: float


class SuccessRate(NamedTuple):
    """A chance, and what it is made of."""

    value: float
    prior: float
    #: Own jobs, each by the weight that its age leaves it.
    jobs: float
    published: float

    def __str__(self) -> str:
        if self.jobs < 0.05:
            return f"{self.value:.0%}, the prior"
        return f"{self.value:.0%}: prior {self.prior:.0%}, {self.published:.1f} of {self.jobs:.1f} own jobs"


class SuccessChances(NamedTuple):
    task: SuccessRate
    family: SuccessRate
    size: SuccessRate

    @property
    def success(self) -> float:
        """The lowest of the three: they are learned from the same jobs, so they are not multiplied."""
        return min(self.task.value, self.family.value, self.size.value)


class _DecayedSum:
    """Jobs and successes, as they counted at the moment `at`."""

    __slots__ = ("at", "jobs", "published")

    def __init__(self, at: float) -> None:
        self.at, self.jobs, self.published = at, 0.0, 0.0

    def add(self, outcome: JobOutcome, half_life: float) -> None:
        if outcome.ended_at > self.at:
            factor = _decay(outcome.ended_at - self.at, half_life)
            self.jobs *= factor
            self.published *= factor
            self.at = outcome.ended_at
        weight = _decay(self.at - outcome.ended_at, half_life)
        self.jobs += weight
        self.published += weight * outcome.published


def _decay(age: float, half_life: float) -> float:
    """The weight of a job of this age. A clock that went backwards makes no job count double."""
    return float(0.5 ** (max(age, 0.0) / half_life))


_TotalsKey = str | Family | SizeBand | None


class _DecayedTotals:
    """All outcomes added up for one half-life and one set of size bands."""

    def __init__(self, half_life: float, bands: tuple[SizeBand, ...]) -> None:
        self.half_life, self.bands = half_life, bands
        self._sums: dict[_TotalsKey, _DecayedSum] = {}

    def band(self, params: int | None) -> SizeBand | None:
        return next((band for band in self.bands if params in band), None)

    def add(self, outcome: JobOutcome) -> None:
        for key in (outcome.kind, outcome.family, self.band(outcome.params)):
            self._sums.setdefault(key, _DecayedSum(outcome.ended_at)).add(outcome, self.half_life)

    def rate(self, key: _TotalsKey, prior: float, weight: float, now: float) -> SuccessRate:
        total = self._sums.get(key)
        if total is None:
            return SuccessRate(prior, prior, 0.0, 0.0)
        factor = _decay(now - total.at, self.half_life)
        jobs, published = total.jobs * factor, total.published * factor
        return SuccessRate((weight * prior + published) / (weight + jobs), prior, jobs, published)


class SuccessHistory:
    def __init__(self, outcomes: Iterable[JobOutcome] = ()) -> None:
        self._by_job: dict[int, JobOutcome] = {}
        #: Grows with everything that is added.
        self.version = 0
        self._published: dict[TaskType, int] = {}
        self._totals: dict[tuple[float, tuple[SizeBand, ...]], _DecayedTotals] = {}
        for outcome in outcomes:
            self.add(outcome)

    def __len__(self) -> int:
        return len(self._by_job)

    def add(self, outcome: JobOutcome) -> None:
        """Add a job that has ended. Added again it counts once, with its last outcome."""
        before = self._by_job.get(outcome.job_id)
        if before == outcome:
            return
        self._by_job[outcome.job_id] = outcome
        self.version += 1
        count = outcome.published - (before.published if before else False)
        self._published[outcome.task_type] = self._published.get(outcome.task_type, 0) + count
        if before is not None:  # a failed job that was started again: rare enough to add everything up again
            self._totals.clear()
        for totals in self._totals.values():
            totals.add(outcome)

    def published(self, task_type: TaskType) -> int:
        """Return how many models of such tasks were ever published."""
        return self._published.get(task_type, 0)

    def chances(
        self, kinds: tuple[str, ...], family: Family, params: int | None, terms: SuccessTerms, now: float
    ) -> SuccessChances:
        totals = self._totals_for(terms)
        band, weight = totals.band(params), terms.prior_weight
        size = terms.size.get(band, terms.prior) if band else terms.prior
        return SuccessChances(
            totals.rate(kinds[0], by_kind(terms.task, kinds, terms.prior), weight, now),
            totals.rate(family, terms.family.get(family, terms.prior), weight, now),
            totals.rate(band, size, weight, now),
        )

    def _totals_for(self, terms: SuccessTerms) -> _DecayedTotals:
        key = (terms.half_life, tuple(terms.size))
        totals = self._totals.get(key)
        if totals is None:
            while len(self._totals) >= _MAX_TOTALS:
                del self._totals[next(iter(self._totals))]
            totals = self._totals[key] = _DecayedTotals(*key)
            for outcome in self._by_job.values():
                totals.add(outcome)
        return totals


#: Jobs beyond this number, the older ones, are left out: they weigh nothing.
MAX_OUTCOMES = 50_000

#: Cancelled jobs say nothing about our chances, nor do starts that were infeasible and not accepted before.
#: The request is read for image tasks alone: it names the image type.
_SELECT_OUTCOMES = f"""
SELECT jobs.id, jobs.task_type, jobs.model, jobs.state, jobs.updated_at, offers.params,
    CASE WHEN jobs.task_type = '{TaskType.IMAGE}' THEN jobs.request END AS request
FROM jobs
LEFT JOIN offers ON offers.validator = jobs.validator AND offers.task_id = jobs.task_id
LEFT JOIN decisions ON decisions.id = offers.decision_id
WHERE jobs.state IN ('{JobState.DONE}', '{JobState.FAILED}') AND jobs.updated_at >= ?
    AND (jobs.end_reason IS NOT '{EndReason.INFEASIBLE}' OR decisions.accepted)
ORDER BY jobs.updated_at DESC LIMIT ?
"""  # noqa: S608 - our enums


def job_outcomes(connection: sqlite3.Connection, now: float, *, since: float = 0.0) -> list[JobOutcome]:
    """Return the newest outcomes, oldest first. What a clock ahead of ours has written counts as of now."""
    rows = connection.execute(_SELECT_OUTCOMES, (since, MAX_OUTCOMES)).fetchall()
    return [outcome for row in reversed(rows) for outcome in _outcome(row, now)]


def read_outcomes(store: Store, now: float, since: float = 0.0) -> list[JobOutcome]:
    """Return the outcomes of jobs that have ended since then."""
    return store.read_now(job_outcomes, now, since=since)


def _outcome(row: sqlite3.Row, now: float) -> Iterator[JobOutcome]:
    try:
        task_type = TaskType(row["task_type"])
    except ValueError:  # of a version that knew more types
        return
    image_type = _image_type(row) if not task_type.is_text else None
    kind, family, params = _subject(task_type, row["model"], row["params"], image_type)
    yield JobOutcome(
        job_id=row["id"],
        task_type=task_type,
        kind=kind,
        family=family,
        params=params,
        published=row["state"] == JobState.DONE,
        ended_at=min(row["updated_at"], now),
    )


def _image_type(row: sqlite3.Row) -> ImageModelType:
    try:
        return ImageModelType(json.loads(row["request"])["model_type"])
    except (ValueError, KeyError, TypeError):
        return image_type_from_name(row["model"])


@lru_cache(maxsize=4096)
def _subject(
    task_type: TaskType, model: str, params: int | None, image_type: ImageModelType | None
) -> tuple[str, Family, int | None]:
    """Describe the job as `parse_offer` does an offer; not the model's shape, which takes a millisecond."""
    kind = task_kinds(task_type, image_type, model)[0]
    if image_type is not None:
        facts = image_model_facts(model, image_type)
        return kind, facts.family, facts.params_total
    return kind, family_from_name(model), estimate_size(model, params).params
