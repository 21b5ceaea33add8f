"""Builds the daemon: its parts, in one visible order, and the two web applications in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp

from core.wire import TournamentType, TrainingRepoResponse
from miner import __version__
from miner.alerts import Alerts
from miner.api import errors, operator, signed, subnet
from miner.api import jobs as jobs_api
from miner.api.front import Front
from miner.auth import Authenticator, Gate
from miner.chain.base import Metagraph
from miner.chain.factory import build_source
from miner.chain.keeper import MetagraphKeeper
from miner.clock import SteadyClock
from miner.fiber import public_key
from miner.fleet.base import Ability
from miner.fleet.build import build_fleet, build_inventory
from miner.fleet.inventory import Inventory
from miner.fleet.local import LocalFleet
from miner.housekeeping import Chore, Housekeeping
from miner.identity import IdentityError
from miner.jobs.book import JobBook
from miner.jobs.build import LOOK_AGAIN_SECONDS, build_jobs
from miner.jobs.live import Live
from miner.jobs.manager import Jobs, NoJobsYet
from miner.jobs.pulse import NOT_TRIED
from miner.limits import Buckets, Rate
from miner.metrics import Metrics
from miner.nonces import NonceLedger
from miner.offers.inbox import Inbox
from miner.offers.judge import Judge
from miner.offers.promises import Promises
from miner.running import made_token
from miner.settings import EngineKind, Settings
from miner.store import database
from miner.store.books import Books
from miner.store.writer import StoreUnavailable

log = logging.getLogger(__name__)

#: How long the start waits for a first metagraph when none is cached. A file is there at once, a chain takes
#: seconds, and is not waited for.
FIRST_METAGRAPH_SECONDS = 0.5
#: How often jobs that have ended are learned from, and old offers and events forgotten.
LEARN_SECONDS = 60.0
PRUNE_SECONDS = 600.0
_DAY = 86_400.0


@dataclass
class Daemon:
    """The running parts. `start` brings them up in the order of need, `stop` takes them down in reverse."""

    settings: Settings
    #: Our own address. Answering needs no private key, so the daemon never opens it.
    hotkey: str
    clock: SteadyClock
    books: Books
    metrics: Metrics
    keeper: MetagraphKeeper
    nonces: NonceLedger
    fleet: LocalFleet
    inventory: Inventory
    judge: Judge
    inbox: Inbox
    authenticator: Authenticator
    alerts: Alerts
    started_at: float = 0.0
    housekeeping: Housekeeping = field(init=False)
    #: Why this daemon can't go on, and who is told then.
    broken: str = ""
    on_broken: Callable[[], None] = lambda: None
    #: None until there is an engine, which is not waited for: validators are answered meanwhile.
    jobs: Jobs | None = None
    _beginning: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.housekeeping = Housekeeping(
            [
                Chore("the database's files", self._look_at_the_store),
                Chore("what time has ended", self._settle),
                Chore("expired nonces", lambda: self.nonces.sweep(time.time())),
                Chore("edited policies and profiles", self._refresh),
                Chore("jobs to learn from", self._learn, LEARN_SECONDS),
                Chore("old offers and events", self._prune, PRUNE_SECONDS),
                Chore("what finished jobs have left", self._make_room, PRUNE_SECONDS),
            ]
        )
        self.inbox.on_started = self._on_started

    async def start(self) -> None:
        self.started_at = time.time()
        # The memory of what was used and promised comes back before anything can be asked of us.
        with database.failures_told(self.books.path):
            self.nonces.load(self.started_at)
            self.books.writer.start(asyncio.get_running_loop())
        await self.inventory.start()
        self.judge.refresh(self.fleet.stock.installed)
        with database.failures_told(self.books.path):
            self.inbox.load()
            self.judge.learn(self.books.outcomes(self.clock()))
        await self._settle()
        if self.settings.engine is not EngineKind.NONE:
            self.fleet.ability = NOT_TRIED
        await self.keeper.start()
        await self._first_metagraph()
        self.housekeeping.start()
        self._in_background(self._begin_jobs())

    async def stop(self) -> None:
        await self.housekeeping.stop()
        # Before the fleet and the books, which it writes to. Trainings go on without us.
        for task in self._beginning:
            task.cancel()
        await asyncio.gather(*self._beginning, return_exceptions=True)
        if self.jobs is not None:
            await self.jobs.close()
        await self.keeper.stop()
        await self.inventory.stop()
        # Last: whatever was still answered is on disk when this returns.
        await self.books.writer.close()

    async def status(self) -> dict[str, Any]:
        chain = self.keeper.status()
        own = self.keeper.current.find(self.authenticator.miner_key) if self.keeper.current else None
        fleet = self.fleet.stock
        return {
            "version": __version__,
            "hotkey": self.hotkey,
            "uid": own.uid if own else None,
            "uptime_seconds": round(time.time() - self.started_at, 1),
            "chain": chain.as_dict(),
            "promises": {
                "jobs": len(self.inbox.promises.jobs),
                "held_offers": len(self.inbox.promises.holds),
            },
            "gpus": {
                "known": len(fleet.gpus),
                "usable": self.fleet.usable_count,
                "waiting_jobs": len(self.fleet.queue()),
                "trouble": fleet.trouble,
            },
            "training": {
                "engine": self.jobs.parts.engine.name if self.jobs else None,
                "trouble": self.fleet.ability.trouble,
                "no_sandbox": self.fleet.ability.no_sandbox,
                "lacks": dict(self.fleet.ability.lacks),
                "jobs_worked_on": self.jobs.working if self.jobs else 0,
            },
            "policy": self.judge.policy.name,
            "profile": self.judge.profile.name,
            **self.judge.problems,
            "doubted_clock_seconds": self.clock.doubted_seconds,
            "books": await asyncio.to_thread(self.books.summary),
            "live_nonces": len(self.nonces),
        }

    @property
    def book(self) -> JobBook:
        """What is written down of jobs, to be read."""
        return JobBook(self.books, clock=self.clock)

    def live(self, job_id: int) -> Live | None:
        return self.jobs.live(job_id) if self.jobs else None

    @property
    def running_jobs(self) -> Jobs:
        if self.jobs is None:
            raise NoJobsYet("there is no engine to train with yet; the log and `god-miner doctor` say why")
        return self.jobs

    def close_streams(self) -> None:
        """What would otherwise be answered for ever; before the operator's port closes."""
        if self.jobs is not None:
            self.jobs.parts.bus.close()

    async def _begin_jobs(self) -> None:
        """Take up what earlier lives have left, as soon as there is something to do it with. What is accepted
        meanwhile has to be trained, so a disk that is full for an hour must not end this."""
        if self.settings.engine is EngineKind.NONE:
            log.info("nothing is trained: ENGINE=none")
            return
        while True:
            try:
                if self.jobs is None:
                    self.jobs = await self._build_jobs()
                await self.jobs.start()
            except Exception as error:  # whatever it is, a later try may go well
                log.exception("the jobs can't be taken up; it is tried again")
                self.alerts("jobs", f"the jobs can't be taken up yet: {error}")
                self.fleet.ability = Ability(trouble=f"the jobs can't be taken up: {error}")
                await asyncio.sleep(LOOK_AGAIN_SECONDS)
            else:
                return

    async def _build_jobs(self) -> Jobs:
        return await build_jobs(
            self.settings,
            self.books,
            self.fleet,
            lambda: self.judge.profile,
            alert=self.alerts,
            clock=self.clock,
            on_taken=self.inbox.promises.jobs.add,
            on_over=self.inbox.promises.over,
        )

    def _on_started(self, job_id: int) -> None:
        # One that comes before the jobs are up is in the books, and taken up from there.
        if self.jobs is not None:
            self._in_background(self.jobs.started(job_id))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._beginning.add(task)
        task.add_done_callback(self._noted)

    def _noted(self, task: asyncio.Task[None]) -> None:
        self._beginning.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.alerts("jobs", f"a job could not be taken up: {error}")
            log.error("a job could not be taken up", exc_info=error)

    async def _make_room(self) -> None:
        if self.jobs is not None and self.jobs.room is not None:
            await self.jobs.room.tidy(self.clock())

    async def _first_metagraph(self) -> None:
        """Wait a moment for the first metagraph: a validator that calls right now should not be told 503."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_METAGRAPH_SECONDS):
                while self.keeper.current is None:  # noqa: ASYNC110 - half a second at most, once
                    await asyncio.sleep(0.01)

    async def _look_at_the_store(self) -> None:
        """Without its files no write will ever succeed; a new life opens them anew."""
        lost = await asyncio.to_thread(database.removed_files, self.books.path)
        if lost and not self.broken:
            self.broken = f"{', '.join(lost)} was removed while the daemon ran; it has to be started anew"
            log.error("%s", self.broken)
            self.on_broken()

    async def _settle(self) -> None:
        await self.inbox.settle(self.clock())
        self.fleet.arrange()

    async def _refresh(self) -> None:
        self.judge.refresh(self.fleet.stock.installed)

    async def _learn(self) -> None:
        since = time.time() - 2 * LEARN_SECONDS
        self.judge.learn(await asyncio.to_thread(self.books.outcomes, self.clock(), since))

    async def _prune(self) -> None:
        before = self.clock() - self.settings.history_days * _DAY
        while await self.books.prune(before):
            pass  # in slices, with requests in between


def build(settings: Settings, hotkey: str) -> Daemon:
    """Make all parts; nothing runs yet."""
    metrics = Metrics()
    books = Books(database.prepare(settings.data_dir))
    alerts = Alerts(metrics, books)
    clock = SteadyClock(told=alerts)
    keeper = MetagraphKeeper(
        build_source(settings, None),
        cache_path=settings.data_dir / "metagraph.json",
        refresh_seconds=settings.metagraph_refresh_seconds,
        stale_seconds=settings.metagraph_stale_seconds,
        on_alert=alerts,
    )
    nonces = NonceLedger(books, max_live=settings.max_live_nonces)
    fleet = build_fleet(settings, clock)
    judge = Judge(settings, alerts)
    inbox = Inbox(
        books,
        Promises(judge, fleet, hold_seconds=settings.offer_hold_seconds),
        training_repos(settings),
        metrics,
        refusal_seconds=settings.refusal_seconds,
        clock=clock,
    )
    daemon = Daemon(
        settings=settings,
        hotkey=hotkey,
        clock=clock,
        books=books,
        metrics=metrics,
        keeper=keeper,
        nonces=nonces,
        fleet=fleet,
        inventory=build_inventory(settings, fleet, alerts.of_gpu, clock),
        judge=judge,
        inbox=inbox,
        authenticator=_authenticator(settings, hotkey, nonces, keeper),
        alerts=alerts,
    )
    _add_gauges(daemon)
    return daemon


def public_app(daemon: Daemon) -> ASGIApp:
    """What validators see."""
    # No redirects from '/task_offer' to '/task_offer/' (a redirected POST is lost by most clients), and no
    # schema page: strangers have no business reading it.
    app = _fastapi("god-miner")
    app.state.authenticator = daemon.authenticator
    app.state.inbox = daemon.inbox

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Whether this daemon answers; says nothing about it that a stranger could use."""
        return {"status": "ok", "version": __version__}

    subnet.add_routes(app)
    return Front(
        app,
        signed.direct(app),
        on_error=errors.error_reply,
        metrics=daemon.metrics,
        max_concurrent=daemon.settings.max_concurrent_requests,
    )


def operator_app(daemon: Daemon) -> ASGIApp:
    """What the operator sees."""
    app = _fastapi("god-miner operator")
    app.state.daemon = daemon
    app.state.metrics = daemon.metrics
    try:
        app.state.operator_token = made_token(daemon.settings)
    except OSError as error:
        text = f"the operator's token can't be kept in {daemon.settings.data_dir} ({error.strerror})"
        raise StoreUnavailable(f"{text}; free disk space, or set OPERATOR_TOKEN") from None
    app.state.operator_failures = Buckets(_failures(daemon.settings))
    app.include_router(operator.build_router())
    app.include_router(jobs_api.build_router())
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
    errors.install(app)
    return app


def _authenticator(
    settings: Settings, hotkey: str, nonces: NonceLedger, keeper: MetagraphKeeper
) -> Authenticator:
    def metagraph() -> Metagraph | None:
        return keeper.current

    own_key = public_key(hotkey)
    if own_key is None:
        raise IdentityError(f"the hotkey's address {hotkey!r} is not an ss58 address; see WALLET_PATH")

    def keys(addresses: tuple[str, ...]) -> frozenset[bytes]:
        return frozenset(key for address in addresses if (key := public_key(address)) is not None)

    return Authenticator(
        miner_key=own_key,
        gate=Gate(
            min_stake=settings.min_stake_threshold,
            require_permit=settings.require_validator_permit,
            allowed=keys(settings.allow_hotkeys),
            denied=keys(settings.deny_hotkeys),
        ),
        nonces=nonces,
        metagraph=metagraph,
        failures=_failures(settings),
        requests=Rate(settings.request_rate_per_hotkey, settings.request_burst_per_hotkey),
    )


def _failures(settings: Settings) -> Rate:
    """Refused requests that one address may send."""
    return Rate(settings.failure_rate_per_address / 60, settings.failure_burst_per_address)


def _add_gauges(daemon: Daemon) -> None:
    gauge, promises, fleet = daemon.metrics.gauge, daemon.inbox.promises, daemon.fleet
    gauge("open_jobs", "Jobs that are not over", lambda: float(len(promises.jobs)))
    gauge("held_offers", "Accepted offers without a start yet", lambda: float(len(promises.holds)))
    gauge("gpus", "Cards that are known", lambda: float(len(fleet.stock.gpus)))
    gauge("usable_gpus", "Cards that may be used", lambda: float(fleet.usable_count))
    gauge("busy_gpus", "Cards that a job runs on", lambda: float(fleet.busy_count))
    gauge("waiting_jobs", "Jobs that wait for GPUs", lambda: float(len(fleet.queue())))
    gauge(
        "jobs_worked_on",
        "Jobs that a worker looks after",
        lambda: float(daemon.jobs.working if daemon.jobs else 0),
    )
    gauge("live_nonces", "Nonces that could still be replayed", lambda: float(len(daemon.nonces)))
    gauge("pending_writes", "Writes waiting for the disk", lambda: float(daemon.books.writer.pending))
    gauge("metagraph_age_seconds", "Age of the metagraph in use", lambda: daemon.keeper.age() or 0.0)
