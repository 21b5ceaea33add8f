"""What the daemon shows of itself: `/status`; and `/overview`, all that the page's first look
needs, for which one dashboard asks every two seconds."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from typing import Annotated, Protocol

from fastapi import APIRouter, Depends, Request

from miner import __version__
from miner.api.alerts import Alert
from miner.api.fleet import FleetStatus
from miner.api.jobs import LiveJob, RunningJob
from miner.api.reports import Kpi
from miner.api.status import (
    ChainSummary,
    DaemonStatus,
    DaemonSummary,
    GpuCounts,
    Overview,
    ReservationCounts,
    TrainingStatus,
)
from miner.chain.auth import Authenticator
from miner.chain.metagraph_refresh import MetagraphRefresher
from miner.chain.nonces import NonceLedger
from miner.fleet.fleet import Fleet
from miner.fleet.inventory import GpuInventory
from miner.fleet.samples import SampleHistory
from miner.http.operator import fleet_status, operator_only
from miner.jobs import views
from miner.jobs.figures import RunFigures
from miner.jobs.manager import JobManager
from miner.notify.notifier import Notifier
from miner.offers.past_offers import OfferFilter, stored_offers
from miner.offers.policy_runtime import PolicyRuntime
from miner.offers.service import OfferService
from miner.offers.views import offer_summary
from miner.publish.reachable import HubReachability
from miner.reports.kpis import CurrentKpis
from miner.store import alerts as store_alerts
from miner.store import jobs as store_jobs
from miner.store.store import Store
from miner.support.clock import SteadyClock

SHOWN_JOBS, SHOWN_ENDED, SHOWN_DECISIONS, SHOWN_ALERTS = 50, 5, 20, 50
#: Points of a job's little curve.
SPARK_POINTS = 60


class ObservedDaemon(Protocol):
    """The parts of the daemon that the overview shows."""

    hotkey: str
    started_at: float
    store: Store
    fleet: Fleet
    inventory: GpuInventory
    samples: SampleHistory
    metagraphs: MetagraphRefresher
    policy_runtime: PolicyRuntime
    offer_service: OfferService
    kpis: CurrentKpis
    jobs: JobManager | None
    clock: SteadyClock
    authenticator: Authenticator
    nonces: NonceLedger
    notifier: Notifier
    hub: HubReachability

    def live(self, job_id: int) -> LiveJob | None: ...

    def figures(self, job_id: int) -> RunFigures | None: ...


def overview_dependency(request: Request) -> ObservedDaemon:
    daemon: ObservedDaemon = request.app.state.daemon
    return daemon


def build_overview_router() -> APIRouter:
    router = APIRouter(dependencies=[Depends(operator_only)])
    router.add_api_route("/status", show_status, methods=["GET"])
    router.add_api_route("/overview", show_overview, methods=["GET"])
    return router


async def show_status(daemon: Annotated[ObservedDaemon, Depends(overview_dependency)]) -> DaemonStatus:
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
            engine=_engine_names(daemon),
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


async def show_overview(daemon: Annotated[ObservedDaemon, Depends(overview_dependency)]) -> Overview:
    """Show whether it is alive and earns: state, indicators, GPUs, jobs, alerts and the last decisions."""
    kpis, fleet = await daemon.kpis.read(), await fleet_status(daemon, is_short=True)
    return await daemon.store.read(_overview, daemon, kpis, fleet)


def _overview(
    db: sqlite3.Connection, daemon: ObservedDaemon, kpis: list[Kpi], fleet: FleetStatus
) -> Overview:
    newest = OfferFilter(most=SHOWN_DECISIONS)
    return Overview(
        at=time.time(),
        daemon=_summary(daemon),
        kpis=kpis,
        fleet=fleet,
        jobs=[
            RunningJob(**dict(views.job_summary(db, row, daemon.live(row.id))), spark=_spark(daemon, row.id))
            for row in store_jobs.newest_jobs(db, SHOWN_JOBS, only_open=True)
        ],
        ended=[views.job_summary(db, row) for row in store_jobs.newest_ended_jobs(db, SHOWN_ENDED)],
        alerts=Alert.of_each(store_alerts.open_alerts(db)[:SHOWN_ALERTS]),
        decisions=[offer_summary(offer) for offer in reversed(stored_offers(db, newest))],
    )


def _spark(daemon: ObservedDaemon, job_id: int) -> list[float]:
    """The loss of the attempt that runs."""
    figures = daemon.figures(job_id)
    return thinned(figures.curves.columns["loss"]) if figures else []


def _engine_names(daemon: ObservedDaemon) -> str | None:
    return ", ".join(engine.name for engine in daemon.jobs.services.engines.values()) if daemon.jobs else None


def _uptime(daemon: ObservedDaemon) -> float:
    return round(time.time() - daemon.started_at, 1)


def _summary(daemon: ObservedDaemon) -> DaemonSummary:
    chain, reservations = daemon.metagraphs.status(), daemon.offer_service.reservations
    return DaemonSummary(
        version=__version__,
        hotkey=daemon.hotkey,
        uptime_seconds=_uptime(daemon),
        engine=_engine_names(daemon),
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
    """So many of them, evenly spread, the last one among them."""
    known = [value for value in values if value is not None]
    if len(known) <= most:
        return known
    step = (len(known) - 1) / (most - 1)
    return [known[round(step * number)] for number in range(most)]
