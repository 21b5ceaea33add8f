"""The daemon: its parts, in the order in which they are built and started, and its two web applications."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, field
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp

from core.domain.errors import GodMinerError
from core.domain.wire import TournamentType, TrainingRepoResponse
from miner import __version__
from miner.chain.auth import Authenticator, CallerPolicy
from miner.chain.identity import IdentityError
from miner.chain.metagraph import Metagraph
from miner.chain.metagraph_refresh import METAGRAPH_FILE, MetagraphRefresher, build_source
from miner.chain.nonces import NonceLedger
from miner.config_files.what_if import WhatIf
from miner.daemon_client import ensure_operator_token
from miner.fleet.base import EngineAbility
from miner.fleet.build import build_fleet, build_inventory, build_sampler
from miner.fleet.fleet import Fleet
from miner.fleet.inventory import GpuInventory
from miner.fleet.nvml import NvmlSource
from miner.fleet.power import FILE_NAME as POWER_FILE
from miner.fleet.power import PowerLimits
from miner.fleet.sampler import GpuSampler
from miner.fleet.samples import SampleHistory
from miner.http.alerts import build_alerts_router
from miner.http.config import build_config_router
from miner.http.errors import install_error_handlers
from miner.http.jobs import build_jobs_router
from miner.http.measurements import build_measurements_router
from miner.http.middleware import RequestMiddleware
from miner.http.offers import build_offers_router
from miner.http.operator import build_operator_router
from miner.http.overview import build_overview_router
from miner.http.reports import build_reports_router
from miner.http.subnet import add_routes
from miner.http.training import build_training_router
from miner.jobs.build import ENGINE_RETRY_SECONDS, build_jobs
from miner.jobs.control import RunningTraining
from miner.jobs.engine_ability import ENGINE_NOT_FOUND_YET
from miner.jobs.events import LiveJob
from miner.jobs.figures import RunFigures
from miner.jobs.manager import JobManager, JobsNotReady
from miner.observe.alerts import AlertKind, Alerts
from miner.observe.metrics import Metrics
from miner.observe.redact import Redactor
from miner.offers.history import read_outcomes
from miner.offers.policy_runtime import PolicyRuntime
from miner.offers.service import OfferService
from miner.settings import EngineKind, Settings
from miner.store import database
from miner.store.alerts import prune_alerts
from miner.store.database import StoreUnavailable
from miner.store.events import prune_history
from miner.store.ranks import RankRow, record_rank
from miner.store.samples import prune_rollups
from miner.store.store import Store
from miner.support.addresses import public_key
from miner.support.background import PeriodicTask, PeriodicTasks
from miner.support.clock import SteadyClock
from miner.support.rate_limits import RateLimit, TokenBuckets
from miner.watch.alert_rules import LiveAlertRules
from miner.watch.alert_service import AlertService
from miner.watch.kpis import CurrentKpis
from miner.watch.metrics import LiveMeasurements
from miner.watch.notify import Notifier
from miner.watch.notify_targets import NotifyTargets
from miner.watch.prometheus import DaemonCollector
from miner.watch.requests import RequestWatch

log = logging.getLogger(__name__)

#: How long the start waits for a first metagraph when none is cached: enough for a file. A chain takes
#: seconds, and is not waited for.
FIRST_METAGRAPH_SECONDS = 0.5
#: How often jobs that have ended are learned from, and old offers and events forgotten.
LEARN_SECONDS = 60.0
PRUNE_SECONDS = 600.0
#: For power limits to be put back before a stop.
RESTORE_SECONDS = 10.0
_DAY = 86_400.0


@dataclass
class Daemon:
    """The running parts. `start` starts them so that each has what it needs, `stop` goes in reverse."""

    settings: Settings
    #: The miner's own address. Answering needs no private key, so the daemon never opens it.
    hotkey: str
    clock: SteadyClock
    store: Store
    metrics: Metrics
    metagraphs: MetagraphRefresher
    nonces: NonceLedger
    fleet: Fleet
    inventory: GpuInventory
    #: What was measured in the last hour, by the sampler.
    samples: SampleHistory
    sampler: GpuSampler
    power: PowerLimits
    policy_runtime: PolicyRuntime
    offer_service: OfferService
    authenticator: Authenticator
    alerts: Alerts
    request_watch: RequestWatch
    kpis: CurrentKpis
    notifier: Notifier
    started_at: float = 0.0
    periodic_tasks: PeriodicTasks = field(init=False)
    rule_task: PeriodicTasks = field(init=False)
    alert_service: AlertService = field(init=False)
    collector: DaemonCollector = field(init=False)
    #: Why this daemon cannot go on; `on_failure` is called then.
    failure: str = ""
    on_failure: Callable[[], None] = lambda: None
    #: None until there is an engine, which the start does not wait for: validators are answered meanwhile.
    jobs: JobManager | None = None
    _background_tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.alert_service = self._alert_service()
        self.alert_service.sink = self.notifier
        self.alerts.add_listener(self.alert_service.on_kind)
        self.periodic_tasks = PeriodicTasks(
            [
                PeriodicTask("the database's files", self._check_store_files),
                PeriodicTask("overdue offers and jobs", self._expire_overdue),
                PeriodicTask("expired nonces", lambda: self.nonces.sweep(time.time())),
                PeriodicTask("edited policies and profiles", self._reload_policies),
                PeriodicTask("jobs to learn from", self._learn_from_outcomes, LEARN_SECONDS),
                PeriodicTask("old offers, events and measurements", self._prune_history, PRUNE_SECONDS),
                PeriodicTask("reports to send", self._send_reports, LEARN_SECONDS),
                PeriodicTask("disk space of finished jobs", self._clean_disk, PRUNE_SECONDS),
            ]
        )
        # A runner of their own: what they ask of a driver that hangs must not keep an offer from its end.
        self.rule_task = PeriodicTasks([PeriodicTask("alert rules", self.alert_service.evaluate)])
        self.offer_service.on_started = self._on_started
        self.metagraphs.on_refresh = self._record_rank
        self.collector = DaemonCollector(self)
        self.metrics.registry.register(self.collector)

    def _alert_service(self) -> AlertService:
        settings = self.settings
        last_good = settings.data_dir / "last-good" / "alerts.json"
        return AlertService(
            self.store,
            self.metrics,
            LiveAlertRules(settings.alerts_file, last_good, self.alerts),
            LiveMeasurements(
                self.samples, self.request_watch, self.trainings, self.authenticator.clock_offsets.measure
            ),
            clock=self.clock,
            power=self.power,
            file_problems=lambda: {
                **self.policy_runtime.problems,
                AlertKind.FLEET_FILE_PROBLEM: self.inventory.file_problem(),
            },
        )

    async def start(self) -> None:
        self.started_at = time.time()
        # Used nonces and accepted offers are loaded before any request can come.
        with database.store_errors(self.store.path):
            self.nonces.load_live(self.started_at)
            self.store.writer.start(asyncio.get_running_loop())
        await self.inventory.start()
        self.policy_runtime.refresh(self.fleet.inventory.installed)
        with database.store_errors(self.store.path):
            self.offer_service.restore()
            self.policy_runtime.add_outcomes(read_outcomes(self.store, self.clock()))
        await self._expire_overdue()
        if self.settings.engine is not EngineKind.NONE:
            self.fleet.ability = ENGINE_NOT_FOUND_YET
        await self.notifier.start()
        await self.metagraphs.start()
        await self._wait_for_first_metagraph()
        self.periodic_tasks.start()
        self.rule_task.start()
        self.sampler.start()
        self._in_background(self.power.restore_after_restart())
        self._in_background(self._start_jobs())

    async def stop(self) -> None:
        await self.periodic_tasks.stop()
        await self.rule_task.stop()
        # Before the fleet and the store, which it writes to. Trainings go on without us.
        for task in self._background_tasks:
            task.cancel()
        await asyncio.gather(*self._background_tasks, return_exceptions=True)
        if self.jobs is not None:
            await self.jobs.close()
        await self.metagraphs.stop()
        with contextlib.suppress(TimeoutError):  # where the driver hangs the next start puts them back
            async with asyncio.timeout(RESTORE_SECONDS):
                await self.power.restore()
        await self.sampler.stop()
        await self.inventory.stop()
        await self.notifier.stop()
        # Last: whatever was still answered is on disk when this returns.
        await self.store.writer.close()

    async def status(self) -> dict[str, Any]:
        chain, graph = self.metagraphs.status(), self.metagraphs.current
        own = graph.nodes_by_key.get(self.authenticator.miner_key) if graph else None
        fleet = self.fleet.inventory
        return {
            "version": __version__,
            "hotkey": self.hotkey,
            "uid": own.uid if own else None,
            "uptime_seconds": round(time.time() - self.started_at, 1),
            "chain": asdict(chain),
            "promises": {
                "jobs": len(self.offer_service.reservations.jobs),
                "held_offers": len(self.offer_service.reservations.holds),
            },
            "gpus": {
                "known": len(fleet.gpus),
                "usable": self.fleet.usable_count,
                "waiting_jobs": len(self.fleet.queue()),
                "trouble": fleet.problem,
            },
            "training": {
                "engine": self.jobs.services.engine.name if self.jobs else None,
                "trouble": self.fleet.ability.problem,
                "no_sandbox": self.fleet.ability.no_sandbox,
                "lacks": dict(self.fleet.ability.missing),
                "jobs_worked_on": self.jobs.running_workers if self.jobs else 0,
            },
            "policy": self.policy_runtime.policy.name,
            "profile": self.policy_runtime.profile.name,
            **self.policy_runtime.problems,
            "doubted_clock_seconds": self.clock.doubted_seconds,
            "notifications": self.notifier.status(),
            "store": await self.store.summary(),
            "live_nonces": len(self.nonces),
        }

    def live(self, job_id: int) -> LiveJob | None:
        return self.jobs.live(job_id) if self.jobs else None

    def figures(self, job_id: int) -> RunFigures | None:
        return self.jobs.figures(job_id) if self.jobs else None

    def trainings(self) -> list[RunningTraining] | None:
        """What trains now; None while nobody knows, because there is no engine yet."""
        if self.jobs is None:
            return [] if self.settings.engine is EngineKind.NONE else None
        return self.jobs.trainings

    @property
    def running_jobs(self) -> JobManager:
        if self.jobs is None:
            raise JobsNotReady("there is no engine to train with yet; the log and `god-miner doctor` say why")
        return self.jobs

    def close_streams(self) -> None:
        """End the event streams, which would keep the operator's port open."""
        if self.jobs is not None:
            self.jobs.services.events.close()

    async def _start_jobs(self) -> None:
        """Resume the jobs of before the restart, and start new ones, as soon as there is an engine. What is
        accepted meanwhile has to be trained, so a disk that is full for an hour must not end this."""
        if self.settings.engine is EngineKind.NONE:
            log.info("nothing is trained: ENGINE=none")
            return
        while True:
            try:
                if self.jobs is None:
                    self.jobs = await self._build_jobs()
                await self.jobs.start()
            except Exception as error:  # whatever it is, a later try may succeed
                log.exception("the jobs cannot be started; it is tried again")
                self.alerts(AlertKind.JOBS, f"the jobs cannot be started yet: {error}")
                self.fleet.ability = EngineAbility(problem=f"the jobs cannot be started: {error}")
                await asyncio.sleep(ENGINE_RETRY_SECONDS)
            else:
                return

    async def _build_jobs(self) -> JobManager:
        return await build_jobs(
            self.settings,
            self.store,
            self.fleet,
            lambda: self.policy_runtime.profile,
            alert=self.alerts,
            samples=self.samples,
            clock=self.clock,
            on_taken=self.offer_service.reservations.jobs.add,
            on_over=self.offer_service.reservations.end_job,
        )

    def _on_started(self, job_id: int) -> None:
        # A start that comes before there is a job manager is in the store, and begun from there.
        if self.jobs is not None:
            self._in_background(self.jobs.started(job_id))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background_tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._background_tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.alerts(AlertKind.JOBS, f"a job could not be started: {error}")
            log.error("a job could not be started", exc_info=error)

    def _record_rank(self, graph: Metagraph) -> None:
        """Keep the own place of every metagraph that is read."""
        key = self.authenticator.miner_key
        node, rank = graph.nodes_by_key.get(key), graph.rank(key)
        if node is None or rank is None:
            return
        row = RankRow(
            graph.fetched_at, graph.block, node.uid, rank, len(graph.nodes), node.incentive, node.emission
        )
        with contextlib.suppress(GodMinerError):  # the disk is full: the next refresh brings another
            self.store.write(record_rank, row).add_done_callback(_log_if_not_recorded)

    async def _send_reports(self) -> None:
        """Send each report of REPORTS once, when its period is over and REPORT_HOUR has come."""
        settings = self.settings
        if settings.notify_urls and settings.reports:
            from miner.watch.sent_reports import send_due_reports  # most daemons send none

            terms = self.policy_runtime.policy.terms
            await send_due_reports(
                self.store,
                self.notifier,
                terms,
                settings.reports,
                settings.report_hour,
                self.clock(),
                Redactor(settings.secrets()),
            )

    async def _clean_disk(self) -> None:
        if self.jobs is not None:
            await self.jobs.services.cleaner.remove_expired()

    async def _wait_for_first_metagraph(self) -> None:
        """Wait a moment for the first metagraph, so that a validator that calls right now gets no 503."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_METAGRAPH_SECONDS):
                while self.metagraphs.current is None:  # noqa: ASYNC110 - half a second at most, once
                    await asyncio.sleep(0.01)

    async def _check_store_files(self) -> None:
        """Fail when files of the database were removed: no write can succeed before a restart."""
        lost = await asyncio.to_thread(database.removed_files, self.store.path)
        if lost and not self.failure:
            self.failure = f"{', '.join(lost)} was removed while the daemon ran; restart it"
            log.error("%s", self.failure)
            self.on_failure()

    async def _expire_overdue(self) -> None:
        await self.offer_service.expire(self.clock())
        self.fleet.schedule()

    async def _reload_policies(self) -> None:
        self.policy_runtime.refresh(self.fleet.inventory.installed)

    async def _learn_from_outcomes(self) -> None:
        since = time.time() - 2 * LEARN_SECONDS
        self.policy_runtime.add_outcomes(
            await asyncio.to_thread(read_outcomes, self.store, self.clock(), since)
        )

    async def _prune_history(self) -> None:
        now, kept = self.clock(), self.settings.history_days * _DAY
        while await self.store.write(prune_history, now - kept):
            pass  # in slices, with requests in between
        while await self.store.write(prune_rollups, now, kept):
            pass
        await self.store.write(prune_alerts, now - kept)


def _log_if_not_recorded(future: asyncio.Future[bool]) -> None:
    if not future.cancelled() and future.exception() is not None:
        log.debug("the rank is not recorded: %s", future.exception())


def build_daemon(settings: Settings, hotkey: str) -> Daemon:
    """Build all parts; nothing runs yet."""
    metrics = Metrics()
    store = Store(database.prepare_store(settings.data_dir))
    alerts = Alerts(metrics, store)
    clock = SteadyClock(on_jump=lambda text: alerts(AlertKind.CLOCK_JUMPED, text))
    metagraphs = MetagraphRefresher(
        build_source(settings, None),
        cache_path=settings.data_dir / METAGRAPH_FILE,
        refresh_seconds=settings.metagraph_refresh_seconds,
        stale_seconds=settings.metagraph_stale_seconds,
        on_alert=alerts,
    )
    nonces = NonceLedger(store, max_live=settings.max_live_nonces)
    fleet, nvml, samples = build_fleet(settings, clock), NvmlSource(), SampleHistory()
    policy_runtime = PolicyRuntime(settings, alerts)
    offer_service = OfferService(
        store,
        policy_runtime,
        fleet,
        training_repos(settings),
        metrics,
        hold_seconds=settings.offer_hold_seconds,
        refusal_seconds=settings.refusal_seconds,
        clock=clock,
    )
    return Daemon(
        settings=settings,
        hotkey=hotkey,
        clock=clock,
        store=store,
        metrics=metrics,
        metagraphs=metagraphs,
        nonces=nonces,
        fleet=fleet,
        inventory=build_inventory(settings, fleet, nvml, alerts, clock),
        samples=samples,
        sampler=build_sampler(settings, fleet, nvml, samples, store, clock),
        power=PowerLimits(nvml, settings.data_dir / POWER_FILE),
        policy_runtime=policy_runtime,
        offer_service=offer_service,
        authenticator=_authenticator(settings, hotkey, nonces, metagraphs),
        alerts=alerts,
        request_watch=RequestWatch(),
        notifier=Notifier(
            store,
            NotifyTargets.from_settings(settings, Redactor(settings.secrets())),
            period=settings.notify_period_seconds,
            host=socket.gethostname(),
            clock=clock,
        ),
        kpis=CurrentKpis(store, lambda: policy_runtime.policy.terms.targets, clock),
    )


def public_app(daemon: Daemon) -> ASGIApp:
    """What validators see."""
    # No redirects from '/task_offer' to '/task_offer/' (a redirected POST is lost by most clients), and no
    # schema page: strangers have no business reading it.
    app = _fastapi("god-miner")
    app.state.authenticator = daemon.authenticator
    app.state.offer_service = daemon.offer_service
    app.state.request_watch = daemon.request_watch

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Whether this daemon answers; nothing that a stranger could use."""
        return {"status": "ok", "version": __version__}

    add_routes(app)
    return RequestMiddleware(
        app, metrics=daemon.metrics, max_concurrent=daemon.settings.max_concurrent_requests
    )


def operator_app(daemon: Daemon) -> ASGIApp:
    """What the operator sees."""
    app = _fastapi("god-miner operator")
    app.state.daemon = daemon
    app.state.metrics = daemon.metrics
    try:
        app.state.operator_token = ensure_operator_token(daemon.settings)
    except OSError as error:
        text = f"the operator's token cannot be written to {daemon.settings.data_dir} ({error.strerror})"
        raise StoreUnavailable(f"{text}; free disk space, or set OPERATOR_TOKEN") from None
    app.state.operator_failures = TokenBuckets(_failure_limit(daemon.settings))
    app.include_router(build_operator_router())
    app.include_router(build_jobs_router())
    app.include_router(build_training_router())
    app.include_router(build_measurements_router())
    app.include_router(build_alerts_router())
    app.include_router(build_overview_router())
    app.state.what_if = WhatIf()
    app.include_router(build_offers_router())
    app.include_router(build_reports_router())
    app.include_router(build_config_router())
    return app


def training_repos(settings: Settings) -> dict[TournamentType, TrainingRepoResponse]:
    repos = {}
    for task_type in TournamentType:
        repo = settings.training_repo(task_type.value)
        if repo is not None:
            repos[task_type] = TrainingRepoResponse(
                github_repo=repo.url,
                commit_hash=repo.commit,
                github_token=repo.token.get_secret_value() if repo.token else None,
                requested_datasets=list(repo.datasets) or None,
            )
    return repos


def _fastapi(title: str) -> FastAPI:
    app = FastAPI(
        title=title,
        version=__version__,
        redirect_slashes=False,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    install_error_handlers(app)
    return app


def _authenticator(
    settings: Settings, hotkey: str, nonces: NonceLedger, metagraphs: MetagraphRefresher
) -> Authenticator:
    own_key = public_key(hotkey)
    if own_key is None:
        raise IdentityError(f"the hotkey's address {hotkey!r} is not an ss58 address; see WALLET_PATH")

    return Authenticator(
        miner_key=own_key,
        policy=CallerPolicy.from_settings(settings),
        nonces=nonces,
        metagraphs=metagraphs,
        failures=_failure_limit(settings),
        requests=RateLimit(settings.request_rate_per_hotkey, settings.request_burst_per_hotkey),
    )


def _failure_limit(settings: Settings) -> RateLimit:
    """Refused requests that one address may send."""
    return RateLimit(settings.failure_rate_per_address / 60, settings.failure_burst_per_address)
