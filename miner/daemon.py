"""The daemon: its parts, in the order in which they are built and started, and what it does while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

from core.domain.errors import GodMinerError
from core.domain.keys import TaskKey
from core.domain.wire import TournamentType, TrainingRepoResponse
from miner.alerts.metrics import LiveMeasurements
from miner.alerts.request_watch import RequestWatch
from miner.alerts.rules import LiveAlertRules
from miner.alerts.service import AlertService
from miner.alerts.tournament_entries import LOOK_S, TournamentEntries
from miner.alerts.upstream_rules import DAY_S, FIRST_S, UpstreamRules
from miner.api.jobs import LiveJob
from miner.api.reports import Rank
from miner.backends.build_fleet import build_fleet, build_inventory, build_sampler
from miner.chain.auth import Authenticator, CallerPolicy
from miner.chain.identity import IdentityError
from miner.chain.metagraph import Metagraph
from miner.chain.metagraph_refresh import METAGRAPH_FILE, MetagraphRefresher
from miner.chain.nonces import NonceLedger
from miner.chain.sources import build_source
from miner.fleet.base import BackendAbility
from miner.fleet.fleet_file import Prices
from miner.fleet.nvml import NvmlSource
from miner.fleet.sampler import SampleHistory
from miner.http.prometheus import DaemonCollector
from miner.jobs.backend_ability import BACKEND_NOT_FOUND_YET
from miner.jobs.build import BACKEND_RETRY_SECONDS, build_jobs
from miner.jobs.figures import RunFigures
from miner.jobs.manager import JobManager, JobsNotReady, cancel_in_store
from miner.jobs.running_training import RunningTraining
from miner.notify.notifier import PERIOD_SECONDS, Notifier
from miner.notify.targets import NotifyTargets
from miner.observe.alerts import AlertKind, Alerts
from miner.observe.metrics import Metrics
from miner.observe.redact import Redactor
from miner.offers.history import read_outcomes
from miner.offers.policy_runtime import PolicyRuntime
from miner.offers.service import OfferService
from miner.publish.reachable import HubReachability
from miner.reports.current import CurrentFigures
from miner.settings import Settings
from miner.store import database
from miner.store.alerts import prune_alerts
from miner.store.events import prune_history
from miner.store.jobs import JobRow
from miner.store.ranks import record_rank
from miner.store.samples import prune_rollups
from miner.store.store import Store
from miner.support.addresses import public_key
from miner.support.background import OneBlockingCall, PeriodicTask, PeriodicTasks
from miner.support.clock import SteadyClock

log = logging.getLogger(__name__)

#: How long the start waits for a first metagraph when none is cached: enough for a file. A chain takes
#: seconds, and is not waited for.
FIRST_METAGRAPH_SECONDS = 0.5
#: How often jobs that have ended are learned from, and old offers and events forgotten.
LEARN_SECONDS = 60.0
PRUNE_SECONDS = 600.0
#: Time limit of one check of the operator's files for edits.
FILES_SECONDS = 10.0
#: How often it is tried whether the hub can be reached.
HUB_SECONDS = 300.0
_DAY = 86_400.0


class Daemon:
    """The running parts. `__init__` builds them, `start` starts them so that each has what it needs, `stop`
    goes in reverse."""

    def __init__(self, settings: Settings, hotkey: str) -> None:
        """Build all parts; nothing runs yet. `hotkey` is the miner's own address: answering needs no private
        key, so the daemon never opens it."""
        self.settings, self.hotkey = settings, hotkey
        self.started_at = 0.0
        #: Why this daemon cannot go on; `on_failure` is called then.
        self.failure = ""
        self.on_failure: Callable[[], None] = lambda: None
        #: None until there is a backend, which the start does not wait for.
        self.jobs: JobManager | None = None
        self._background_tasks: set[asyncio.Task[None]] = set()
        self._file_looks = OneBlockingCall("policies, profiles, alert rules and FLEET_FILE", FILES_SECONDS)
        #: Why the files were not checked; empty while they can be.
        self._files_hang = ""

        self.metrics = Metrics()
        self.store = Store(database.prepare_store(settings.store_dir))
        self.alerts = Alerts(self.metrics)
        self.clock = SteadyClock(on_jump=lambda text: self.alerts(AlertKind.CLOCK_JUMPED, text))
        self._build_chain()
        self._build_fleet()
        self.policy_runtime = PolicyRuntime(settings, self.alerts)
        self.offer_service = OfferService(
            self.store,
            self.policy_runtime,
            self.fleet,
            _training_repos(settings),
            self.metrics,
            hold_seconds=settings.offer_hold_seconds,
            clock=self.clock,
        )
        self.offer_service.on_started = self._on_started
        #: Empty until it is known.
        self._hotkey_problem: dict[str, str | None] = {}
        self._build_alerts()
        self.periodic_tasks = PeriodicTasks(
            [
                PeriodicTask("the database's files", self._check_store_files),
                PeriodicTask("overdue offers and jobs", self._expire_overdue),
                PeriodicTask("expired nonces", lambda: self.nonces.sweep(time.time())),
                PeriodicTask("jobs to learn from", self._learn_from_outcomes, LEARN_SECONDS),
                PeriodicTask("old offers, events and measurements", self._prune_history, PRUNE_SECONDS),
                PeriodicTask("reports to send", self._send_reports, LEARN_SECONDS),
                PeriodicTask("disk space of finished jobs", self._clean_disk, PRUNE_SECONDS),
            ]
        )
        # Runners of their own: a driver or a network that hangs must not keep an offer from its end.
        self.rule_task = PeriodicTasks([PeriodicTask("alert rules", self.alert_service.evaluate)])
        self.file_task = PeriodicTasks([PeriodicTask("edited files", self.reload_files)])
        self.hub_task = PeriodicTasks([PeriodicTask("the hub", self.hub.check, HUB_SECONDS)])
        self.upstream_task = PeriodicTasks(
            [
                PeriodicTask(
                    "upstream's rules of tournaments",
                    self.upstream_rules.check,
                    DAY_S,
                    time.monotonic() - DAY_S + FIRST_S,
                ),
                PeriodicTask(
                    "tournament entries",
                    self.tournament_entries.check,
                    LOOK_S,
                    time.monotonic() - LOOK_S + FIRST_S,
                ),
            ]
        )

    def _build_chain(self) -> None:
        """Build the checks of callers: metagraph, nonces, authenticator."""
        settings = self.settings
        own_key = public_key(self.hotkey)
        if own_key is None:
            raise IdentityError(
                f"the hotkey's address {self.hotkey!r} is not an ss58 address; see WALLET_PATH"
            )
        self.nonces = NonceLedger(self.store)
        self.metagraphs = MetagraphRefresher(
            build_source(settings, None),
            cache_path=settings.data_dir / METAGRAPH_FILE,
            on_alert=self.alerts,
        )
        self.metagraphs.on_refresh = self._record_rank
        self.authenticator = Authenticator(
            miner_key=own_key,
            policy=CallerPolicy.from_settings(settings),
            nonces=self.nonces,
            metagraphs=self.metagraphs,
        )

    def _build_fleet(self) -> None:
        """The GPUs and what measures them."""
        settings, nvml = self.settings, NvmlSource()
        self.fleet = build_fleet(settings, self.clock)
        self.inventory = build_inventory(settings, self.fleet, nvml, self.alerts, self.clock)
        #: What was measured in the last hour.
        self.samples = SampleHistory()
        self.sampler = build_sampler(settings, self.fleet, nvml, self.samples, self.store, self.clock)

    def _build_alerts(self) -> None:
        """Alert rules, notifications, indicators, and what a scrape shows."""
        settings = self.settings
        self.request_watch = RequestWatch()
        self.hub = HubReachability(settings.hf_endpoint)
        self.upstream_rules = UpstreamRules(settings.data_dir / "tournament" / "answers", self.alerts)
        self.tournament_entries = TournamentEntries(_training_repos(settings), settings.data_dir, self.alerts)
        self.current = CurrentFigures(
            self.store, lambda: self.policy_runtime.policy.terms.targets, self.prices, self.clock
        )
        self.notifier = Notifier(
            self.store,
            NotifyTargets.from_settings(settings, Redactor(settings.secrets())),
            period=PERIOD_SECONDS,
            host=socket.gethostname(),
            clock=self.clock,
        )
        self.alert_service = AlertService(
            self.store,
            self.metrics,
            LiveAlertRules(
                settings.alerts_file, settings.data_dir / "last-good" / "alerts.json", self.alerts
            ),
            LiveMeasurements(
                self.samples, self.request_watch, self.trainings, self.authenticator.clock_offsets.measure
            ),
            clock=self.clock,
            standing_problems=lambda: {
                **self.policy_runtime.problems,
                AlertKind.FLEET_FILE_PROBLEM: self.inventory.file_problem(),
                **self._hotkey_problem,
                AlertKind.FILES_HANG: self._files_hang or None,
                **self.upstream_rules.standing(),
                **self.tournament_entries.standing(),
            },
        )
        self.alert_service.sink = self.notifier
        self.alerts.listener = self.alert_service.on_kind
        self.collector = DaemonCollector(self)
        self.metrics.registry.register(self.collector)

    def note_hotkey(self, problem: str | None) -> None:
        """Raise an alert if the hotkey cannot be opened; if it can, end the alert, also an earlier
        process's."""
        self._hotkey_problem[AlertKind.HOTKEY_LOCKED] = problem
        if problem is not None:
            self.alerts(AlertKind.HOTKEY_LOCKED, problem)

    async def start(self) -> None:
        self.started_at = time.time()
        self.alerts.loop = asyncio.get_running_loop()
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
        self.fleet.abilities = dict.fromkeys(self.settings.backends, BACKEND_NOT_FOUND_YET)
        await self.notifier.start()
        await self.metagraphs.start()
        await self._wait_for_first_metagraph()
        self.periodic_tasks.start()
        self.rule_task.start()
        self.file_task.start()
        if self.settings.backends:
            self.hub_task.start()
        self.upstream_task.start()
        self.sampler.start()
        self._in_background(self._start_jobs())

    async def stop(self) -> None:
        await self.periodic_tasks.stop()
        await self.rule_task.stop()
        await self.file_task.stop()
        await self.hub_task.stop()
        await self.upstream_task.stop()
        # Before the fleet and the store, which it writes to. Trainings go on without us.
        for task in self._background_tasks:
            task.cancel()
        await asyncio.gather(*self._background_tasks, return_exceptions=True)
        if self.jobs is not None:
            await self.jobs.close()
        await self.metagraphs.stop()
        await self.sampler.stop()
        await self.inventory.stop()
        await self.notifier.stop()
        # Last: whatever was still answered is on disk when this returns.
        await self.store.writer.close()

    def prices(self) -> Prices:
        return Prices.in_force(self.settings, self.inventory.terms())

    def live(self, job_id: int) -> LiveJob | None:
        return self.jobs.live(job_id) if self.jobs else None

    def figures(self, job_id: int) -> RunFigures | None:
        return self.jobs.figures(job_id) if self.jobs else None

    def trainings(self) -> list[RunningTraining] | None:
        """Return the trainings that run, or None while there is no backend that knows them."""
        if self.jobs is None:
            return None if self.settings.backends else []
        return self.jobs.trainings

    @property
    def running_jobs(self) -> JobManager:
        if self.jobs is None:
            raise JobsNotReady(
                "there is no backend to train with yet; the log and `god-miner doctor` say why"
            )
        return self.jobs

    async def cancel_job(self, job_id: int) -> JobRow:
        """Cancel a job, also without a backend."""
        if self.jobs is not None:
            return await self.jobs.cancel(job_id)
        row = await cancel_in_store(self.store, job_id, self.clock)
        self.offer_service.reservations.end_job(TaskKey(row.validator, row.task_id))
        return row

    def close_streams(self) -> None:
        """End the event streams, which would keep the operator's port open."""
        if self.jobs is not None:
            self.jobs.services.events.close()

    async def _start_jobs(self) -> None:
        """Resume the jobs of before the restart, and start new ones, as soon as there is a backend. What is
        accepted meanwhile has to be trained, so a disk that is full for an hour must not end this."""
        if not self.settings.backends:
            log.info("nothing is trained: BACKEND=none")
            return
        while True:
            try:
                if self.jobs is None:
                    self.jobs = await self._build_jobs()
                await self.jobs.start()
            except Exception as error:  # whatever it is, a later try may succeed
                log.exception("the jobs cannot be started; it is tried again")
                self.alerts(AlertKind.JOBS, f"the jobs cannot be started yet: {error}")
                problem = BackendAbility(problem=f"the jobs cannot be started: {error}")
                self.fleet.abilities = dict.fromkeys(self.settings.backends, problem)
                await asyncio.sleep(BACKEND_RETRY_SECONDS)
            else:
                return

    async def _build_jobs(self) -> JobManager:
        jobs = await build_jobs(
            self.settings,
            self.store,
            self.fleet,
            lambda: self.policy_runtime.profile,
            alert=self.alerts,
            worth=self.policy_runtime.training_worth,
            samples=self.samples,
            clock=self.clock,
        )
        jobs.on_taken = self.offer_service.reservations.jobs.add
        jobs.on_over = self.offer_service.reservations.end_job
        return jobs

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
        row = Rank(
            at=graph.fetched_at,
            block=graph.block,
            uid=node.uid,
            rank=rank,
            miners=len(graph.nodes),
            incentive=node.incentive,
            emission=node.emission,
            tao_per_day=None if graph.tao_per_day is None else node.emission * graph.tao_per_day,
        )
        with contextlib.suppress(GodMinerError):  # the disk is full: the next refresh brings another
            self.store.write(record_rank, row).add_done_callback(_log_if_not_recorded)

    async def _send_reports(self) -> None:
        """Send each report of REPORTS once, when its period is over."""
        settings = self.settings
        if settings.notify_urls and settings.reports:
            from miner.reports.report import send_due_reports  # most daemons send none

            terms = self.policy_runtime.policy.terms
            await send_due_reports(
                self.store,
                self.notifier,
                (terms, self.prices()),
                settings.reports,
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

    async def reload_files(self) -> None:
        """Load edits of policies, profiles, rules and FLEET_FILE. If their file system hangs or fails, what
        was read last stays in force."""

        def look() -> None:
            self.inventory.refresh_file()
            self.policy_runtime.refresh(self.fleet.inventory.installed)
            self.alert_service.rules.refresh()

        try:
            await self._file_looks.run(look)
        except OSError as error:  # no answer in time, or that of a server which has lost its files
            if not self._files_hang:
                self._files_hang = f"{error}; what was read before stays in force"
                self.alerts(AlertKind.FILES_HANG, self._files_hang)
        else:
            self._files_hang = ""

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


def _training_repos(settings: Settings) -> dict[TournamentType, TrainingRepoResponse]:
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
