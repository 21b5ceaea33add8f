"""What became of earlier jobs, and the chances of success that follow from it.

A policy's prior counts as so many jobs (`prior_weight`); own jobs are added to it, each weighing less the
older it is (`half_life`). So one lucky job moves little, a hundred of them outweigh the prior, and last
year's are forgotten. Sums that fade can be kept up to date one job at a time: a decision adds up nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from core.models import Family
from core.profile.words import SizeBand
from core.tasks import TaskType
from miner.offers.policies.schema import Success, by_kind

#: Ways of adding up that are kept at once: one for the policy in force, one or two for a look at another.
_MOST_VIEWS = 4


class Outcome(NamedTuple):
    """A job that has ended. One that the operator cancelled tells nothing and is none."""

    job_id: int
    task_type: TaskType
    #: The most exact word that policies have for it: `instruct`, `flux`.
    kind: str
    family: Family
    #: None: not known.
    params: int | None
    published: bool
    ended_at: float


class Rate(NamedTuple):
    """A chance, and what it was made of."""

    value: float
    prior: float
    #: Own jobs, each by the weight that its age leaves it.
    jobs: float
    published: float

    def __str__(self) -> str:
        if self.jobs < 0.05:
            return f"{self.value:.0%}, the prior"
        return f"{self.value:.0%}: prior {self.prior:.0%}, {self.published:.1f} of {self.jobs:.1f} own jobs"


class Chances(NamedTuple):
    task: Rate
    family: Rate
    size: Rate

    @property
    def success(self) -> float:
        """As good as the weakest of the three sides: they tell of the same jobs, so they don't multiply."""
        return min(self.task.value, self.family.value, self.size.value)


class _Sum:
    """Jobs and successes, worth what they were at the moment `at`."""

    __slots__ = ("at", "jobs", "published")

    def __init__(self, at: float) -> None:
        self.at, self.jobs, self.published = at, 0.0, 0.0

    def add(self, outcome: Outcome, half_life: float) -> None:
        if outcome.ended_at > self.at:
            faded = _faded(outcome.ended_at - self.at, half_life)
            self.jobs *= faded
            self.published *= faded
            self.at = outcome.ended_at
        weight = _faded(self.at - outcome.ended_at, half_life)
        self.jobs += weight
        self.published += weight * outcome.published


def _faded(age: float, half_life: float) -> float:
    """A clock that went backwards makes no job count double."""
    return float(0.5 ** (max(age, 0.0) / half_life))


_Key = str | Family | SizeBand | None


class _View:
    """All outcomes added up for one half-life and one set of size bands."""

    def __init__(self, half_life: float, bands: tuple[SizeBand, ...]) -> None:
        self.half_life, self.bands = half_life, bands
        self._sums: dict[_Key, _Sum] = {}

    def band(self, params: int | None) -> SizeBand | None:
        return next((band for band in self.bands if params in band), None)

    def add(self, outcome: Outcome) -> None:
        for key in (outcome.kind, outcome.family, self.band(outcome.params)):
            self._sums.setdefault(key, _Sum(outcome.ended_at)).add(outcome, self.half_life)

    def rate(self, key: _Key, prior: float, weight: float, now: float) -> Rate:
        known = self._sums.get(key)
        if known is None:
            return Rate(prior, prior, 0.0, 0.0)
        faded = _faded(now - known.at, self.half_life)
        jobs, published = known.jobs * faded, known.published * faded
        return Rate((weight * prior + published) / (weight + jobs), prior, jobs, published)


class History:
    def __init__(self, outcomes: Iterable[Outcome] = ()) -> None:
        self._by_job: dict[int, Outcome] = {}
        #: Grows with everything that is learned.
        self.version = 0
        self._published: dict[TaskType, int] = {}
        self._views: dict[tuple[float, tuple[SizeBand, ...]], _View] = {}
        for outcome in outcomes:
            self.add(outcome)

    def __len__(self) -> int:
        return len(self._by_job)

    def add(self, outcome: Outcome) -> None:
        """Take in a job that has ended. Told twice it counts once; told otherwise, the last word counts."""
        known = self._by_job.get(outcome.job_id)
        if known == outcome:
            return
        self._by_job[outcome.job_id] = outcome
        self.version += 1
        count = outcome.published - (known.published if known else False)
        self._published[outcome.task_type] = self._published.get(outcome.task_type, 0) + count
        if known is not None:  # a failed job that was started again: rare enough to add everything up anew
            self._views.clear()
        for view in self._views.values():
            view.add(outcome)

    def published(self, task_type: TaskType) -> int:
        """How many models of such tasks were ever published."""
        return self._published.get(task_type, 0)

    def chances(
        self, kinds: tuple[str, ...], family: Family, params: int | None, terms: Success, now: float
    ) -> Chances:
        view = self._view(terms)
        band, weight = view.band(params), terms.prior_weight
        size = terms.size.get(band, terms.prior) if band else terms.prior
        return Chances(
            view.rate(kinds[0], by_kind(terms.task, kinds, terms.prior), weight, now),
            view.rate(family, terms.family.get(family, terms.prior), weight, now),
            view.rate(band, size, weight, now),
        )

    def _view(self, terms: Success) -> _View:
        key = (terms.half_life, tuple(terms.size))
        view = self._views.get(key)
        if view is None:
            while len(self._views) >= _MOST_VIEWS:
                del self._views[next(iter(self._views))]
            view = self._views[key] = _View(*key)
            for outcome in self._by_job.values():
                view.add(outcome)
        return view
