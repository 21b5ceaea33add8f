"""The daemon's state on the operator's port: status, overview, fleet, measurements, reports and alerts."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from operator import attrgetter
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Response
from prometheus_client import CONTENT_TYPE_LATEST

from core.domain.errors import GodMinerError
from core.domain.units import MetricUnit
from miner import __version__
from miner.api.alerts import (
    Alert,
    AlertsPage,
    EndedSilence,
    Silence,
    SilenceRequest,
    TrialDelivery,
    TrialNotification,
    TrialReport,
)
from miner.api.fleet import FleetStatus
from miner.api.jobs import RunningJob
from miner.api.reports import PeriodKind, Report
from miner.api.samples import (
    GPU_NUMBERS,
    HIGHEST,
    HOST_NUMBERS,
    ROLLUP_COLUMNS,
    FleetSamples,
    GpuHistory,
    GpuSample,
    HostSample,
    SampledNumber,
)
from miner.api.status import (
    ChainSummary,
    DaemonStatus,
    DaemonSummary,
    GpuCounts,
    Overview,
    ReservationCounts,
    TrainingStatus,
)
from miner.fleet.costs import GpuCosts
from miner.fleet.fleet_view import fleet_view
from miner.fleet.sampler import KEPT_SECONDS, SampleT
from miner.http.operator import MAX_ROW, Daemon, OperatorDaemon, operator_only
from miner.jobs import views
from miner.observe.redact import Redactor
from miner.offers.past_offers import OfferFilter, stored_offers
from miner.offers.views import offer_summary
from miner.reports.current import Figures
from miner.reports.report import calendar_period, last_period
from miner.store import alerts as store_alerts
from miner.store import jobs as store_jobs
from miner.store.alerts import AlertRow
from miner.store.offers import task_names
from miner.store.samples import HOUR, MINUTE, rollups

SHOWN_JOBS, SHOWN_ENDED, SHOWN_DECISIONS, SHOWN_ALERTS = 50, 5, 20, 50
#: Points of a job's little curve.
SPARK_POINTS = 60
#: The year 2100: calendars end somewhere.
MAX_MOMENT = 4_102_444_800
#: Points of one series; more could not be distinguished in a chart.
MAX_POINTS = 360
#: A longer time is answered by the hour.
MAX_HOURS_OF_MINUTES = 6.0
#: 6,000 rows of eight GPUs; a year of them would be 30 MB, all of it in memory.
MAX_HOURS = 31.0 * 24

#: A row's values; `asdict` takes five times as long.
_values = attrgetter(*ROLLUP_COLUMNS)

router = APIRouter(dependencies=[Depends(operator_only)])
MAX_ALERTS_LISTED = 1000


@router.get("/status")
async def show_status(daemon: Daemon) -> DaemonStatus:
    """Show the daemon's own state."""
    graph, reservations = daemon.metagraphs.current, daemon.offer_service.reservations
    own = graph.nodes_by_key.get(daemon.authenticator.miner_key) if graph else None
    inventory, ability = daemon.fleet.inventory, daemon.fleet.ability
    return DaemonStatus(
        version=__version__,
        hotkey=daemon.hotkey,
        uid=own.uid if own else None,
        uptime_seconds=_uptime(daemon),
        chain=daemon.metagraphs.status(),
        reservations=ReservationCounts(jobs=len(reservations.jobs), held_offers=len(reservations.holds)),
        gpus=GpuCounts(
            known=len(inventory.gpus),
            usable=daemon.fleet.usable_count,
            waiting_jobs=len(daemon.fleet.queue()),
            trouble=inventory.problem,
        ),
        training=TrainingStatus(
            backend=_backend_names(daemon),
            trouble=ability.problem,
            no_sandbox=ability.no_sandbox,
            lacks=dict(ability.missing),
            jobs_worked_on=daemon.jobs.running_workers if daemon.jobs else 0,
        ),
        policy=daemon.policy_runtime.policy.name,
        profile=daemon.policy_runtime.profile.name,
        **daemon.policy_runtime.problems,
        doubted_clock_seconds=daemon.clock.doubted_seconds,
        hub=daemon.hub.status(),
        notifications=daemon.notifier.status(),
        store=await daemon.store.summary(),
        live_nonces=len(daemon.nonces),
    )


@router.get("/overview")
async def show_overview(daemon: Daemon) -> Overview:
    """Show whether it is alive and earns: state, indicators, GPUs, jobs, alerts and the last decisions."""
    figures, fleet = await daemon.current.read(), await fleet_status(daemon, is_short=True)
    return await daemon.store.read(_overview, daemon, figures, fleet)


def _overview(
    db: sqlite3.Connection, daemon: OperatorDaemon, figures: Figures, fleet: FleetStatus
) -> Overview:
    newest, costs = OfferFilter(most=SHOWN_DECISIONS), GpuCosts.read(db, daemon.prices())
    return Overview(
        at=time.time(),
        daemon=_summary(daemon),
        kpis=figures.kpis,
        money=figures.money,
        fleet=fleet,
        jobs=[
            RunningJob(
                **dict(views.job_summary(db, row, daemon.live(row.id), costs)), spark=_spark(daemon, row.id)
            )
            for row in store_jobs.newest_jobs(db, SHOWN_JOBS, store_jobs.OPEN_JOBS)
        ],
        ended=[
            views.job_summary(db, row, costs=costs) for row in store_jobs.newest_ended_jobs(db, SHOWN_ENDED)
        ],
        alerts=Alert.of_each(store_alerts.open_alerts(db)[:SHOWN_ALERTS]),
        decisions=[offer_summary(offer) for offer in reversed(stored_offers(db, newest))],
    )


def _spark(daemon: OperatorDaemon, job_id: int) -> list[float]:
    """The loss of the attempt that runs."""
    figures = daemon.figures(job_id)
    return thinned(figures.curves.columns["loss"]) if figures else []


def _backend_names(daemon: OperatorDaemon) -> str | None:
    return (
        ", ".join(backend.name for backend in daemon.jobs.services.backends.values()) if daemon.jobs else None
    )


def _uptime(daemon: OperatorDaemon) -> float:
    return round(time.time() - daemon.started_at, 1)


def _summary(daemon: OperatorDaemon) -> DaemonSummary:
    chain, reservations = daemon.metagraphs.status(), daemon.offer_service.reservations
    return DaemonSummary(
        version=__version__,
        hotkey=daemon.hotkey,
        uptime_seconds=_uptime(daemon),
        backend=_backend_names(daemon),
        policy=daemon.policy_runtime.policy.name,
        profile=daemon.policy_runtime.profile.name,
        open_jobs=len(reservations.jobs),
        held_offers=len(reservations.holds),
        waiting_jobs=len(daemon.fleet.queue()),
        chain=ChainSummary.model_validate(chain),
        troubles=_troubles(
            ("GPUs", daemon.fleet.inventory.problem),
            ("training", daemon.fleet.ability.problem),
            ("chain", chain.last_error if chain.stale else None),
            ("hub", daemon.hub.problem),
            *daemon.policy_runtime.problems.items(),
        ),
    )


def _troubles(*found: tuple[str, str | None]) -> list[str]:
    return [f"{what.replace('_problem', '')}: {text}" for what, text in found if text]


def thinned(values: Sequence[float | None], most: int = SPARK_POINTS) -> list[float]:
    """Return at most `most` of the known values, evenly spread, with the last one."""
    known = [value for value in values if value is not None]
    if len(known) <= most:
        return known
    step = (len(known) - 1) / (most - 1)
    return [known[round(step * number)] for number in range(most)]


# Fleet


@router.get("/metrics")
async def metrics(daemon: Daemon) -> Response:
    """Return the metrics for Prometheus."""
    await daemon.collector.refresh()
    return Response(daemon.metrics.render(), media_type=CONTENT_TYPE_LATEST)


@router.get("/fleet")
async def show_fleet(daemon: Daemon, short: bool = False) -> FleetStatus:
    """Show the GPUs, who has them until when, what they measure, and what waits. With `short`, leave out a
    cluster's GPUs without a task of ours."""
    return await fleet_status(daemon, is_short=short)


async def fleet_status(daemon: OperatorDaemon, *, is_short: bool = False) -> FleetStatus:
    claimed = [claim.key for claim in daemon.fleet.ledger.claims]
    names = await daemon.store.read(task_names, claimed) if claimed else {}
    now = daemon.clock()
    return fleet_view(daemon.fleet, daemon.inventory, daemon.samples, names, now, is_short=is_short)


# Measurements


@router.get("/samples", response_model=FleetSamples)
async def show_samples(
    daemon: Daemon, seconds: Annotated[float, Query(gt=0, le=KEPT_SECONDS)] = KEPT_SECONDS
) -> Response:
    """Show the measurements of GPUs and host in the last hour at most, as series of up to 360 points."""
    history, since = daemon.samples, daemon.clock() - seconds
    gpus = []
    for gpu in history.gpus:
        gpus.append(f"{_text(gpu)}:{_text(_gpu_series(history.since(gpu, since)))}")
        await asyncio.sleep(0)  # an hour of one GPU takes 4 ms: requests of validators go in between
    head = {
        "interval_s": daemon.sampler.interval,
        "problem": daemon.sampler.problem,
        "host": _host_series(history.host_since(since)),
    }
    return _json(f'{_text(head)[:-1]},"gpus":{{{",".join(gpus)}}}}}')


@router.get("/samples/history", response_model=GpuHistory)
async def show_history(daemon: Daemon, hours: Annotated[float, Query(gt=0, le=MAX_HOURS)] = 24.0) -> Response:
    """Show the minutes (up to 6 hours) or hours (up to 31 days) of each GPU, from the store."""
    period = MINUTE if hours <= MAX_HOURS_OF_MINUTES else HOUR
    since = daemon.clock() - hours * HOUR

    def query(db: sqlite3.Connection) -> Response:
        gpus: dict[str, list[dict[str, object]]] = {}
        for row in rollups(db, period, since - period):
            gpus.setdefault(row.gpu, []).append(dict(zip(ROLLUP_COLUMNS, _values(row), strict=True)))
        return _json(_text({"period_s": period, "gpus": gpus}))

    return await daemon.store.read(query)


def _gpu_series(samples: Sequence[GpuSample]) -> dict[str, object]:
    newest = samples[-1] if samples else None
    return {
        **_thinned(samples, GPU_NUMBERS),
        "throttle": newest and newest.throttle,
        "ecc_errors": newest and newest.ecc_errors,
        "xids": [xid for sample in samples for xid in sample.xids],
        "power_limit_watts": newest and newest.power_limit_watts,
        "memory_total": newest and newest.memory_total,
    }


def _host_series(samples: Sequence[HostSample]) -> dict[str, object]:
    newest = samples[-1] if samples else None
    return {
        **_thinned(samples, HOST_NUMBERS),
        "disk_free_bytes": newest and newest.disk_free_bytes,
        "disk_free_share": newest and newest.disk_free_share,
    }


def _thinned(samples: Sequence[SampleT], numbers: Iterable[SampledNumber]) -> dict[str, object]:
    """Each series with at most `MAX_POINTS` points, each of as many samples, up to the newest: of some the
    highest value, of others the newest."""
    size = -(-len(samples) // MAX_POINTS) or 1
    kept = samples[len(samples) % size :]
    thinned: dict[str, object] = {"at": [round(sample.at, 1) for sample in kept[size - 1 :: size]]}
    for number in numbers:
        if number.series:
            values = [getattr(sample, number.name) for sample in kept]
            if number.unit is MetricUnit.SHARE:
                values = [None if share is None else round(share, 4) for share in values]
            parts = [values[place::size] for place in range(size)]
            has_peaks = number.column in HIGHEST and size > 1
            thinned[number.series] = list(map(_highest, *parts)) if has_peaks else parts[-1]
    return thinned


def _highest(*values: float | None) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _text(value: Any) -> str:
    """FastAPI's own encoder would hold the event loop four times as long."""
    return json.dumps(value, separators=(",", ":"))


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")


# Reports


@router.get("/report")
async def report(
    daemon: Daemon,
    period: PeriodKind = PeriodKind.DAILY,
    at: Annotated[float | None, Query(ge=0, le=MAX_MOMENT, allow_inf_nan=False)] = None,
) -> Report:
    """Report the last day, week or month; with `at`, seconds since the epoch, the calendar period around
    it."""
    from miner.reports.report import (  # some milliseconds that the start need not take
        build_report,
        redacted_report,
    )

    wanted = last_period(period, daemon.clock()) if at is None else calendar_period(period, at)
    policy = daemon.policy_runtime.policy.terms
    prices, redact = daemon.prices(), Redactor(daemon.settings.secrets())

    def query(connection: sqlite3.Connection) -> Report:
        return redacted_report(build_report(connection, wanted, policy, prices), redact)

    return await daemon.store.read(query)


class NobodyNotified(GodMinerError):
    """There is no channel to send anything to."""

    code = "nobody_notified"


@router.get("/alerts")
async def list_alerts(
    daemon: Daemon,
    limit: Annotated[int, Query(ge=1, le=MAX_ALERTS_LISTED)] = 100,
    open_only: Annotated[bool, Query(alias="open")] = False,
) -> AlertsPage:
    """List alerts, newest first; every rule with its state; the silences in force."""
    now = daemon.clock()

    def query(connection: sqlite3.Connection) -> tuple[list[Alert], list[Silence]]:
        alerts = store_alerts.newest_alerts(connection, limit, only_open=open_only)
        return Alert.of_each(alerts), store_alerts.silences_in_force(connection, now)

    alerts, silences = await daemon.store.read(query)
    service = daemon.alert_service
    return AlertsPage(
        alerts=alerts, silences=silences, rules=service.rule_states(), problem=service.rules.problem
    )


@router.post("/alerts/silences", status_code=HTTPStatus.CREATED)
async def add_silence(silence: SilenceRequest, daemon: Daemon) -> Silence:
    """Notify nobody of alerts like `gpu-*` for a while; they are still stored and shown."""
    now = daemon.clock()
    return await daemon.store.write(
        store_alerts.add_silence, silence.rule, silence.subject, silence.reason, now, now + silence.seconds
    )


@router.post("/alerts/test")
async def send_test(daemon: Daemon, test: TrialNotification | None = None) -> TrialReport:
    """Send a notification to every target now, without storing or counting it as an alert. Return each
    target's result."""
    if not daemon.settings.notify_urls:
        raise NobodyNotified("nobody is notified: NOTIFY_URLS names no target")
    wanted, now = test or TrialNotification(), daemon.clock()
    alert = AlertRow(wanted.rule, wanted.subject, wanted.severity, wanted.text, raised_at=now, last_at=now)
    deliveries = await daemon.notifier.test(alert)
    return TrialReport(
        targets=[
            TrialDelivery(target=delivery.target, error=delivery.error or None) for delivery in deliveries
        ]
    )


@router.delete("/alerts/silences/{silence}")
async def end_silence(silence: Annotated[int, Path(ge=1, le=MAX_ROW)], daemon: Daemon) -> EndedSilence:
    """End a silence before its time."""
    await daemon.store.write(store_alerts.end_silence, silence, daemon.clock())
    return EndedSilence(ended=silence)
