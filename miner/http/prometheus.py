"""Numbers that Prometheus scrapes besides the counters: jobs, trainings, GPUs, host, queue, place, alerts.

Everything is read at the scrape, so that the series of a training or of a GPU end with it. What is not known
has no series. Names follow Prometheus' conventions: base units, shares from 0 to 1 as `_ratio`.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from core.domain.errors import GodMinerError
from core.domain.job_states import FINAL_STATES, JobState
from core.domain.units import MetricUnit
from miner import __version__
from miner.api.samples import GPU_NUMBERS, HOST_NUMBERS, GpuSample, HostSample, SampledNumber
from miner.chain.auth import Authenticator
from miner.chain.metagraph_refresh import MetagraphRefresher
from miner.chain.nonces import NonceLedger
from miner.fleet.fleet import Fleet
from miner.fleet.sampler import FRESH_SECONDS, SampleHistory
from miner.fleet.schedule import ClaimStage
from miner.jobs.running_training import RunningTraining
from miner.offers.service import OfferService
from miner.store.alerts import open_alerts
from miner.store.jobs import count_by_state
from miner.store.store import Store

log = logging.getLogger(__name__)

#: How often the store is asked, at most.
STORE_SECONDS = 60.0
#: As in the rule `job-failures` of alerts.yaml.
WEEK_SECONDS = 7 * 86_400.0

#: A job that has the GPU and does not train at the moment keeps it busy.
GPU_STATES = ("training", "busy", "reserved", "others", "idle", "out")
THROTTLE_REASONS = ("heat", "power", "hardware")

TrainingNumber = Callable[[RunningTraining], float | None]
Family = GaugeMetricFamily | CounterMetricFamily

_TRAINING_NUMBERS: Mapping[str, tuple[str, TrainingNumber]] = {
    "training_attempt": ("Which attempt runs", attrgetter("attempt")),
    "training_step": ("Optimizer steps done", attrgetter("live.step")),
    "training_steps": ("Optimizer steps planned", attrgetter("live.steps")),
    "training_loss": ("Training loss", attrgetter("live.loss")),
    "training_learning_rate": ("Learning rate", attrgetter("live.learning_rate")),
    "training_gradient_norm": ("Norm of the gradient", attrgetter("live.grad_norm")),
    "training_base_score": ("Held-out score of the untouched model", attrgetter("live.base_score")),
    "training_score": ("Last held-out score", attrgetter("live.score")),
    "training_best_score": ("Best held-out score", attrgetter("live.best_score")),
    "training_tokens_per_second": ("Tokens trained per second", attrgetter("live.tokens_s")),
    "training_samples_per_second": ("Samples trained per second", attrgetter("live.samples_s")),
    "training_mfu_ratio": ("Model FLOPS utilisation", attrgetter("live.mfu")),
    "training_efficiency_ratio": ("Speed, of what the plan expected", attrgetter("live.efficiency")),
    "training_wait_ratio": ("Time in which the GPU waits for data", attrgetter("live.wait")),
    "training_memory_bytes": ("Highest memory of a GPU", attrgetter("live.memory_bytes")),
    "training_memory_plan_bytes": ("The plan's estimate of it", attrgetter("live.memory_estimate_bytes")),
    "training_start_timestamp_seconds": ("When the attempt began", attrgetter("began_at")),
    "training_expected_end_timestamp_seconds": (
        "When the job will probably be over",
        attrgetter("live.ends_at"),
    ),
    "training_deadline_timestamp_seconds": ("When it has to be over", attrgetter("live.deadline_at")),
}


class ScrapedDaemon(Protocol):
    """The parts of the daemon that Prometheus sees."""

    store: Store
    fleet: Fleet
    samples: SampleHistory
    metagraphs: MetagraphRefresher
    nonces: NonceLedger
    offer_service: OfferService
    authenticator: Authenticator

    def clock(self) -> float: ...

    def trainings(self) -> list[RunningTraining] | None: ...


@dataclass(frozen=True, slots=True)
class _StoredCounts:
    """Counts that only the store has."""

    jobs: Mapping[str, int]
    ended_in_week: Mapping[str, int]
    #: By rule and severity.
    alerts: Mapping[tuple[str, str], int]


def _count_stored(connection: sqlite3.Connection, now: float) -> _StoredCounts:
    return _StoredCounts(
        jobs=count_by_state(connection),
        ended_in_week=count_by_state(connection, now - WEEK_SECONDS),
        alerts=Counter((row.rule, row.severity.value) for row in open_alerts(connection)),
    )


class DaemonCollector(Collector):
    """The daemon as it is now. `refresh` before a scrape reads the store, if that is due."""

    def __init__(self, daemon: ScrapedDaemon) -> None:
        self._daemon = daemon
        self._stored: _StoredCounts | None = None
        self._stored_at = float("-inf")
        self._lock = asyncio.Lock()

    async def refresh(self) -> None:
        """Count what is stored, off the event loop and at most once a minute."""
        async with self._lock:
            now = self._daemon.clock()
            if 0 <= now - self._stored_at < STORE_SECONDS:
                return
            self._stored_at = now
            try:
                self._stored = await self._daemon.store.read(_count_stored, now)
            except GodMinerError as error:
                log.debug("Prometheus gets no counts of the store: %s", error)
                self._stored = None

    def collect(self) -> Iterator[Family]:
        for family in self._families():
            if family.samples:
                yield family

    def _families(self) -> Iterator[Family]:
        now, trainings = self._daemon.clock(), self._daemon.trainings()
        yield from self._process()
        yield from self._place()
        if self._stored is not None:
            yield from _stored_families(self._stored)
        yield from self._gpus(now, trainings)
        host = self._daemon.samples.host
        if host is not None and host.at >= now - FRESH_SECONDS:
            for number in HOST_NUMBERS:
                yield _gauge(number.gauge, number.text, _value(host, number))
        yield from _training_families(trainings or [])

    def _process(self) -> Iterator[Family]:
        daemon = self._daemon
        reservations = daemon.offer_service.reservations
        yield _labelled("build_info", "The version", ["version"], [((__version__,), 1.0)])
        yield _gauge("open_jobs", "Jobs that are not over", len(reservations.jobs))
        yield _gauge("held_offers", "Accepted offers without a start yet", len(reservations.holds))
        yield _gauge("waiting_jobs", "Jobs that wait for GPUs", len(daemon.fleet.queue()))
        yield _gauge("live_nonces", "Nonces that could still be replayed", len(daemon.nonces))
        yield _gauge("pending_writes", "Writes waiting for the disk", daemon.store.writer.pending)

    def _place(self) -> Iterator[Family]:
        """In the subnet, by the metagraph in use."""
        graphs, key = self._daemon.metagraphs, self._daemon.authenticator.miner_key
        yield _gauge("metagraph_age_seconds", "Age of the metagraph in use", graphs.age())
        graph = graphs.current
        node = graph.nodes_by_key.get(key) if graph else None
        if graph is None or node is None:
            return
        yield _gauge("rank", "Place in the subnet by incentive, 1 is best", graph.rank(key))
        yield _gauge("ranked_hotkeys", "Hotkeys that are ranked, validators too", len(graph.nodes))
        yield _gauge("incentive_ratio", "Share of the miners' incentive", node.incentive)

    def _gpus(self, now: float, trainings: Sequence[RunningTraining] | None) -> Iterator[Family]:
        gpus = self._daemon.fleet.inventory.gpus
        names = [(gpu.id, str(gpu.index)) for gpu in gpus]
        kinds = [((*name, gpu.kind.name), 1.0) for name, gpu in zip(names, gpus, strict=True)]
        yield _labelled("gpu_info", "The model of a GPU", ["gpu", "index", "kind"], kinds)
        if trainings is not None:
            states = self._gpu_states(trainings, now)
            values = [((*name, one), float(states[name[0]] == one)) for name in names for one in GPU_STATES]
            labels = ["gpu", "index", "state"]
            yield _labelled("gpu_state", "1 for the state that the GPU is in", labels, values)
        found = [(name, self._daemon.samples.latest(name[0], now - FRESH_SECONDS)) for name in names]
        samples = [(name, sample) for name, sample in found if sample is not None]
        for number in GPU_NUMBERS:
            if number.gauge:
                measured = [(gpu, _value(sample, number)) for gpu, sample in samples]
                yield _labelled(number.gauge, number.text, ["gpu", "index"], measured)
        ecc = CounterMetricFamily(
            "god_miner_gpu_ecc_errors",
            "Uncorrected memory errors since the driver was loaded",
            labels=["gpu", "index"],
        )
        for gpu, sample in samples:
            if sample.ecc_errors is not None:
                ecc.add_metric(gpu, sample.ecc_errors)
        yield ecc
        yield _labelled(
            "gpu_throttled",
            "1 while this holds the clocks down",
            ["gpu", "index", "reason"],
            [
                ((*gpu, reason), float(reason in sample.throttle))
                for gpu, sample in samples
                if sample.throttle is not None
                for reason in THROTTLE_REASONS
            ],
        )

    def _gpu_states(self, trainings: Sequence[RunningTraining], now: float) -> dict[str, str]:
        """The state of each GPU."""
        state = self._daemon.fleet.inventory
        found = {gpu.id: "out" if gpu.unusable_reason else "idle" for gpu in state.gpus}
        others = (gpu.id for gpu in state.gpus if gpu.busy_until(now) is not None)
        found |= {gpu: "others" for gpu in others if found[gpu] == "idle"}
        found |= dict.fromkeys(state.failed.keys() & found.keys(), "out")
        claims = self._daemon.fleet.ledger.claims
        reserved = {gpu for claim in claims if claim.stage is ClaimStage.RESERVED for gpu in claim.gpus}
        running = {gpu for claim in claims if claim.is_running for gpu in claim.gpus}
        training = {gpu for one in trainings if one.training_since is not None for gpu in one.gpus}
        for gpu, before in found.items():
            if gpu in training:
                found[gpu] = "training"
            elif gpu in running:
                found[gpu] = "busy"
            elif gpu in reserved and before == "idle":
                found[gpu] = "reserved"
        return found


def _stored_families(stored: _StoredCounts) -> Iterator[Family]:
    yield _labelled(
        "jobs", "Jobs by state", ["state"], [((state,), stored.jobs.get(state, 0)) for state in JobState]
    )
    yield _labelled(
        "jobs_ended_in_week",
        "Jobs that ended in the last seven days",
        ["state"],
        [((state,), stored.ended_in_week.get(state, 0)) for state in JobState if state in FINAL_STATES],
    )
    yield _labelled(
        "open_alerts", "Alerts that are not resolved", ["kind", "severity"], stored.alerts.items()
    )


def _training_families(trainings: Sequence[RunningTraining]) -> Iterator[Family]:
    # `job` is a label that Prometheus itself gives to what it scrapes.
    names = [(str(one.job_id), one.plan.task.task_type.value) for one in trainings]
    for name, (text, read) in _TRAINING_NUMBERS.items():
        values = ((job, read(one)) for job, one in zip(names, trainings, strict=True))
        yield _labelled(name, text, ["job_id", "task_type"], values)


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"god_miner_{name}", text, value)


def _labelled(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float | None]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"god_miner_{name}", text, labels=labels)
    for label_values, value in values:
        if value is not None:
            family.add_metric(label_values, value)
    return family


def _value(sample: GpuSample | HostSample, number: SampledNumber) -> float | None:
    """The number in a base unit."""
    value: float | None = getattr(sample, number.name)
    return value * 1e6 if value is not None and number.unit is MetricUnit.MEGAHERTZ else value
