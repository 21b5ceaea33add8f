"""Everything that a rule can be about: one registry, with what each number means and where it is read.

What changes by the second is read from memory: samples of GPUs and host, the trainings that run, the requests
of validators. What only the store knows is read in a thread, once a minute.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from core.domain.job_states import EndReason, JobState
from core.domain.units import MetricUnit
from miner.alerts.request_watch import RequestWatch
from miner.api.samples import GPU_NUMBERS, HOST_NUMBERS, GpuSample, HostSample, SampledNumber
from miner.chain.clock_offsets import ClockOffset
from miner.fleet.sampler import SampleHistory
from miner.jobs.running_training import RunningTraining
from miner.observe.alerts import (
    HOST,
    MINER,
    AlertSubject,
    SubjectKind,
    gpu_subject,
    job_subject,
    validator_subject,
)
from miner.store.attempts import failed_steps, figures_of_ended
from miner.store.jobs import count_ends
from miner.store.ranks import newest_rank, ranks_between

#: Seconds for which the trainings' numbers are kept: the longest window of a rule.
KEPT_SECONDS = 3600.0
#: Ends of a step that say that the hub, or the way to it, does not work.
_HUB_FAILURES = (EndReason.NETWORK, EndReason.HUB_REFUSED, EndReason.RATE_LIMITED)


class Point(NamedTuple):
    at: float
    value: float


@dataclass(frozen=True, slots=True)
class MetricSeries:
    """One subject's values, oldest first."""

    points: tuple[Point, ...] = ()
    #: Number of jobs or requests, if it differs from the number of points.
    count: int | None = None
    #: Names and reasons, for people.
    detail: str = ""


SeriesBySubject = Mapping[AlertSubject, MetricSeries]


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that rules can be about. Either `read` or `query` gives the values since a moment."""

    name: str
    scope: SubjectKind
    unit: MetricUnit
    description: str
    read: Callable[[LiveMeasurements, float], SeriesBySubject] | None = None
    #: Reads the store, from a moment until now.
    query: Callable[[sqlite3.Connection, float, float], SeriesBySubject] | None = None


@dataclass
class LiveMeasurements:
    """Measurements that rules read from memory."""

    samples: SampleHistory
    requests: RequestWatch
    #: The trainings that run now, or None while that is not known, as after a start.
    trainings: Callable[[], list[RunningTraining] | None]
    #: The system clock's distance from the validators', or None if too few of them tell.
    clock_offset: Callable[[], ClockOffset | None] = lambda: None
    _recorded: dict[AlertSubject, dict[str, deque[Point]]] = field(default_factory=dict)

    def record(self, now: float) -> None:
        """Note the present numbers of all trainings, and forget those of trainings that are over."""
        running = self.trainings()
        if running is None:
            return
        subjects = {job_subject(training.job_id): training for training in running}
        for gone in self._recorded.keys() - subjects.keys():
            del self._recorded[gone]
        for subject, training in subjects.items():
            numbers = self._recorded.setdefault(subject, {})
            for number in _TRAINING_NUMBERS:
                value = number.read(training, now)
                points = numbers.setdefault(number.name, deque())
                if value is not None:
                    points.append(Point(now, value))
                while points and points[0].at < now - KEPT_SECONDS:
                    points.popleft()

    def recorded(self, name: str, since: float) -> SeriesBySubject:
        return {
            subject: MetricSeries(tuple(point for point in numbers.get(name, ()) if point.at >= since))
            for subject, numbers in self._recorded.items()
        }


# GPUs and the host


def _gpu_metric(number: SampledNumber) -> Metric:
    def read(live: LiveMeasurements, since: float) -> SeriesBySubject:
        return {
            gpu_subject(gpu): MetricSeries(_points(live.samples.since(gpu, since), number))
            for gpu in live.samples.gpus
        }

    return Metric(number.metric, SubjectKind.GPU, number.unit, f"{number.text}.", read)


def _host_metric(number: SampledNumber) -> Metric:
    def read(live: LiveMeasurements, since: float) -> SeriesBySubject:
        return {HOST: MetricSeries(_points(live.samples.host_since(since), number))}

    return Metric(number.metric, SubjectKind.HOST, number.unit, f"{number.text}.", read)


def _points(samples: Iterable[GpuSample | HostSample], number: SampledNumber) -> tuple[Point, ...]:
    values = ((sample.at, getattr(sample, number.name)) for sample in samples)
    return tuple(Point(at, value) for at, value in values if value is not None)


def _xids(live: LiveMeasurements, since: float) -> SeriesBySubject:
    series = {}
    for gpu in live.samples.gpus:
        samples = live.samples.since(gpu, since)
        seen = sorted({xid for sample in samples for xid in sample.xids})
        points = tuple(Point(sample.at, float(len(sample.xids))) for sample in samples)
        series[gpu_subject(gpu)] = MetricSeries(
            points, detail=f"Xid {', '.join(map(str, seen))}" if seen else ""
        )
    return series


# Trainings


@dataclass(frozen=True, slots=True)
class _TrainingNumber:
    """A number of a running training, of which the last hour is kept."""

    name: str
    unit: MetricUnit
    description: str
    #: Reads it of the training, at a moment.
    read: Callable[[RunningTraining, float], float | None]

    def metric(self) -> Metric:
        def read(live: LiveMeasurements, since: float) -> SeriesBySubject:
            return live.recorded(self.name, since)

        return Metric(self.name, SubjectKind.JOB, self.unit, self.description, read)


def _figure(name: str) -> Callable[[RunningTraining, float], float | None]:
    def read(training: RunningTraining, _now: float) -> float | None:
        value = getattr(training.live, name, None)
        return None if value is None or training.training_since is None else float(value)

    return read


def _memory_over_plan(training: RunningTraining, _now: float) -> float | None:
    measured, estimate = training.live.memory_bytes, training.plan.memory.total_bytes
    return measured / estimate if measured and estimate else None


def _training_time(training: RunningTraining, now: float) -> float:
    return now - training.began_at


def _deadline_slack(training: RunningTraining, _now: float) -> float | None:
    live = training.live
    return None if live.ends_at is None or live.deadline_at is None else live.deadline_at - live.ends_at


_TRAINING_NUMBERS = (
    _TrainingNumber(
        "job.efficiency",
        MetricUnit.SHARE,
        "Tokens per second, of what the plan expected for this model and GPU.",
        _figure("efficiency"),
    ),
    _TrainingNumber("job.mfu", MetricUnit.SHARE, "Model FLOPS utilisation.", _figure("mfu")),
    _TrainingNumber("job.wait", MetricUnit.SHARE, "Time in which the GPU waits for data.", _figure("wait")),
    _TrainingNumber("job.tokens_s", MetricUnit.PER_SECOND, "Tokens trained per second.", _figure("tokens_s")),
    _TrainingNumber("job.loss", MetricUnit.COUNT, "Training loss.", _figure("loss")),
    _TrainingNumber(
        "job.memory",
        MetricUnit.BYTES,
        "Highest memory of a GPU, as the training reports it.",
        _figure("memory_bytes"),
    ),
    _TrainingNumber(
        "job.memory_over_plan", MetricUnit.SHARE, "The same, of the plan's estimate.", _memory_over_plan
    ),
    _TrainingNumber("job.training_time", MetricUnit.SECONDS, "Time since the attempt began.", _training_time),
    _TrainingNumber(
        "job.deadline_slack",
        MetricUnit.SECONDS,
        "Time between the expected end and the deadline; below 0 it will be late.",
        _deadline_slack,
    ),
)


# Validators


def _invalid_requests(live: LiveMeasurements, since: float) -> SeriesBySubject:
    return {
        validator_subject(hotkey): MetricSeries(
            tuple(Point(at, value) for at, value in outcomes if at >= since),
            detail=live.requests.problem(hotkey),
        )
        for hotkey, outcomes in live.requests.outcomes()
    }


def _new_fields(live: LiveMeasurements, since: float) -> SeriesBySubject:
    return {
        validator_subject(hotkey): MetricSeries(
            (Point(at, float(len(names))),), detail=", ".join(sorted(names))
        )
        for hotkey, at, names in live.requests.new_fields(since)
    }


def _clock_offset(live: LiveMeasurements, since: float) -> SeriesBySubject:
    offset = live.clock_offset()
    if offset is None:
        return {MINER: MetricSeries(detail="fewer than two validators have sent anything in the last hour")}
    side = "ahead of" if offset.seconds >= 0 else "behind"
    detail = f"this clock is {side} those of {offset.validators} validators"
    return {MINER: MetricSeries((Point(since, abs(offset.seconds)),), detail=detail)}


# The store


def _failed_share(connection: sqlite3.Connection, since: float, now: float) -> SeriesBySubject:
    """Cancelled jobs are the operator's own decision, and count as neither."""
    ends = count_ends(connection, since)
    reasons = Counter[str]()
    for (state, reason), count in ends.items():
        if state is JobState.FAILED:
            reasons[reason or "unknown"] += count
    failed = reasons.total()
    ended = failed + sum(count for (state, _), count in ends.items() if state is JobState.DONE)
    if not ended:
        return {MINER: MetricSeries()}
    shown = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common(4))
    detail = f"{failed} of {ended} jobs{': ' if shown else ''}{shown}"
    return {MINER: MetricSeries((Point(now, failed / ended),), count=ended, detail=detail)}


def _missed_targets(connection: sqlite3.Connection, since: float, now: float) -> SeriesBySubject:
    """Measure jobs whose published model misses its target. One attempt that reached it is enough: the best
    is published."""
    series: dict[AlertSubject, MetricSeries] = {}
    for attempt in figures_of_ended(connection, since, now):
        figures = attempt.figures
        if attempt.state is not JobState.DONE or figures.target_missed is None:
            continue
        subject, missed = job_subject(attempt.job_id), float(figures.target_missed)
        known = series.get(subject)
        if known is None or missed < known.points[0].value:
            series[subject] = MetricSeries((Point(attempt.ended_at, missed),), detail=figures.standing)
    return series


def _rank(connection: sqlite3.Connection, since: float, now: float) -> SeriesBySubject:
    """The place at the beginning of the window is the last one before it."""
    first, last = newest_rank(connection, since), newest_rank(connection, now)
    if last is None:
        return {MINER: MetricSeries()}
    rows = [*ranks_between(connection, first.at if first else 0.0, last.at), last]
    detail = f"from {rows[0].rank} to {last.rank} of {last.miners}"
    return {MINER: MetricSeries(tuple(Point(row.at, row.rank) for row in rows), detail=detail)}


def _hub_failures(connection: sqlite3.Connection, since: float, now: float) -> SeriesBySubject:
    failures, detail = failed_steps(connection, _HUB_FAILURES, since)
    return {MINER: MetricSeries((Point(now, float(failures)),), detail=detail)}


METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        *(_gpu_metric(number) for number in GPU_NUMBERS if number.metric),
        Metric(
            "gpu.xids",
            SubjectKind.GPU,
            MetricUnit.COUNT,
            "Xid errors of the driver, since the last sample.",
            _xids,
        ),
        *(number.metric() for number in _TRAINING_NUMBERS),
        *(_host_metric(number) for number in HOST_NUMBERS if number.metric),
        Metric(
            "requests.invalid",
            SubjectKind.VALIDATOR,
            MetricUnit.SHARE,
            "1 for a signed request that could not be read, 0 for one that could: the mean is their share.",
            _invalid_requests,
        ),
        Metric(
            "requests.new_fields",
            SubjectKind.VALIDATOR,
            MetricUnit.COUNT,
            "Fields in a validator's requests that this version does not know.",
            _new_fields,
        ),
        Metric(
            "miner.clock_offset",
            SubjectKind.MINER,
            MetricUnit.SECONDS,
            "Between this clock and the times that validators sign, either way: the median of at least two.",
            _clock_offset,
        ),
        Metric(
            "jobs.failed",
            SubjectKind.MINER,
            MetricUnit.SHARE,
            "Failed jobs, of those that have ended in the window.",
            query=_failed_share,
        ),
        Metric(
            "job.target_missed",
            SubjectKind.JOB,
            MetricUnit.COUNT,
            "1 for a published model that misses its profile's target_loss or target_gain, 0 for one that "
            "reaches them; for jobs that ended in the window.",
            query=_missed_targets,
        ),
        Metric(
            "rank.place",
            SubjectKind.MINER,
            MetricUnit.COUNT,
            "The miner's place in the subnet, 1 is best.",
            query=_rank,
        ),
        Metric(
            "hub.failures",
            SubjectKind.MINER,
            MetricUnit.COUNT,
            "Downloads and uploads that failed in the window: network, refused, rate limited.",
            query=_hub_failures,
        ),
    )
}
