"""How often jobs succeed, how long they take and what they gain, by the kind of task, family and size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

from core.domain.selectors import SizeBand
from miner.reports.ended_jobs import EndedJob
from miner.reports.kpis import mean_hours, success_rate

NOT_KNOWN = "not known"


def success_by(jobs: Sequence[EndedJob], sizes: Iterable[SizeBand]) -> dict[str, list[dict[str, Any]]]:
    """Groups with the most jobs first. `sizes`: bands, those of the policy."""
    bands = list(sizes)

    def size(job: EndedJob) -> str:
        return next((str(band) for band in bands if job.params in band), NOT_KNOWN)

    names: dict[str, Callable[[EndedJob], str]] = {
        "type": lambda job: job.kind,
        "family": lambda job: job.family.value if job.family else NOT_KNOWN,
        "size": size,
    }
    counted = [job for job in jobs if job.counts]
    return {what: _grouped(counted, name) for what, name in names.items()}


def _grouped(jobs: Sequence[EndedJob], name: Callable[[EndedJob], str]) -> list[dict[str, Any]]:
    groups: dict[str, list[EndedJob]] = {}
    for job in jobs:
        groups.setdefault(name(job), []).append(job)
    rows = [{"name": key, **success_of(group)} for key, group in groups.items()]
    return sorted(rows, key=lambda row: (-row["jobs"], row["name"]))


def success_of(jobs: Sequence[EndedJob]) -> dict[str, Any]:
    gains = [job.gain for job in jobs if job.gain is not None]
    return {
        "jobs": sum(job.counts for job in jobs),
        "published": sum(job.published for job in jobs),
        "rate": success_rate(jobs),
        "mean_hours": mean_hours(jobs),
        "mean_gain": fmean(gains) if gains else None,
    }
