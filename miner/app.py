"""Builds the daemon: its parts, in one visible order, and the two web applications in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp

from core.tasks import TaskType
from core.wire import TournamentType, TrainingRepoResponse
from miner import __version__
from miner.api import errors, operator, signed, subnet
from miner.api.front import Express, Front
from miner.auth import Authenticator, Gate
from miner.chain.base import Metagraph
from miner.chain.factory import build_source
from miner.chain.keeper import MetagraphKeeper
from miner.fiber import public_key
from miner.identity import IdentityError
from miner.limits import Rate
from miner.metrics import Metrics
from miner.nonces import NonceLedger
from miner.offers.inbox import Inbox
from miner.offers.policy import PlainPolicy
from miner.settings import Settings
from miner.store import database
from miner.store.books import Books

log = logging.getLogger(__name__)

#: How often what time has ended is noticed: lapsed holds, passed deadlines, expired nonces.
HOUSEKEEPING_SECONDS = 5.0

#: How long the start waits for a first metagraph when none is cached. A file is there at once, a chain takes
#: seconds, and is not waited for.
FIRST_METAGRAPH_SECONDS = 0.5


@dataclass
class Daemon:
    """The running parts. `start` brings them up in the order of need, `stop` takes them down in reverse."""

    settings: Settings
    #: Our own address. Answering needs no private key, so the daemon never opens it.
    hotkey: str
    books: Books
    metrics: Metrics
    keeper: MetagraphKeeper
    nonces: NonceLedger
    inbox: Inbox
    authenticator: Authenticator
    started_at: float = 0.0
    _housekeeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.started_at = time.time()
        # The memory of what was used and promised comes back before anything can be asked of us.
        with database.failures_told(self.books.path):
            self.nonces.load(self.started_at)
            self.inbox.load()
            self.books.writer.start(asyncio.get_running_loop())
        await self.inbox.settle(self.started_at)
        await self.keeper.start()
        await self._first_metagraph()
        self._housekeeper = asyncio.create_task(self._keep_house(), name="housekeeping")

    async def stop(self) -> None:
        if self._housekeeper is not None:
            self._housekeeper.cancel()
            await asyncio.gather(self._housekeeper, return_exceptions=True)
        await self.keeper.stop()
        # Last: whatever was still answered is on disk when this returns.
        await self.books.writer.close()

    async def status(self) -> dict[str, Any]:
        chain = self.keeper.status()
        own = self.keeper.current.find(self.authenticator.miner_key) if self.keeper.current else None
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
            "books": await asyncio.to_thread(self.books.summary),
            "live_nonces": len(self.nonces),
        }

    async def _first_metagraph(self) -> None:
        """Wait a moment for the first metagraph: a validator that calls right now should not be told 503."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_METAGRAPH_SECONDS):
                while self.keeper.current is None:  # noqa: ASYNC110 - half a second at most, once
                    await asyncio.sleep(0.01)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_SECONDS)
            await self._keep_house_once(time.time())

    async def _keep_house_once(self, now: float) -> None:
        for step in (self.inbox.settle, self.nonces.sweep):
            try:
                await step(now)
            except Exception:  # a full disk must not end the housekeeping for good, nor one step the other
                log.exception("housekeeping failed; the next round is in %g s", HOUSEKEEPING_SECONDS)


def build(settings: Settings, hotkey: str) -> Daemon:
    """Make all parts; nothing runs yet."""
    metrics = Metrics()
    books = Books(database.prepare(settings.data_dir))

    def alert(kind: str, text: str) -> None:
        metrics.alerts.labels(kind).inc()
        log.warning("alert %s: %s", kind, text)

    keeper = MetagraphKeeper(
        build_source(settings, None),
        cache_path=settings.data_dir / "metagraph.json",
        refresh_seconds=settings.metagraph_refresh_seconds,
        stale_seconds=settings.metagraph_stale_seconds,
        on_alert=alert,
    )
    nonces = NonceLedger(books, max_live=settings.max_live_nonces)
    inbox = Inbox(
        books,
        PlainPolicy(
            task_types=settings.task_types or tuple(TaskType),
            max_hours=settings.max_hours or 12.0,
            max_jobs=1 if settings.max_jobs is None else settings.max_jobs,
        ),
        training_repos(settings),
        metrics,
        hold_seconds=settings.offer_hold_seconds,
    )
    daemon = Daemon(
        settings=settings,
        hotkey=hotkey,
        books=books,
        metrics=metrics,
        keeper=keeper,
        nonces=nonces,
        inbox=inbox,
        authenticator=_authenticator(settings, hotkey, nonces, keeper),
    )
    _add_gauges(daemon)
    return daemon


@dataclass(frozen=True)
class PublicApp:
    asgi: ASGIApp
    #: Path → the express lane's way in.
    express: Mapping[str, Express]


def public_app(daemon: Daemon) -> PublicApp:
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
    front = Front(
        app,
        on_error=errors.error_reply,
        metrics=daemon.metrics,
        max_concurrent=daemon.settings.max_concurrent_requests,
    )
    express = {route.path: front.express(route, app.state) for route in signed.fixed_routes(app)}
    return PublicApp(front, express)


def operator_app(daemon: Daemon) -> ASGIApp:
    """What the operator sees."""
    app = _fastapi("god-miner operator")
    app.state.daemon = daemon
    app.state.metrics = daemon.metrics
    app.state.operator_token = daemon.settings.operator_token
    app.include_router(operator.build_router())
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
        failures=Rate(settings.failure_rate_per_address / 60, settings.failure_burst_per_address),
        requests=Rate(settings.request_rate_per_hotkey, settings.request_burst_per_hotkey),
    )


def _add_gauges(daemon: Daemon) -> None:
    gauge, promises = daemon.metrics.gauge, daemon.inbox.promises
    gauge("open_jobs", "Jobs that are not over", lambda: float(len(promises.jobs)))
    gauge("held_offers", "Accepted offers without a start yet", lambda: float(len(promises.holds)))
    gauge("live_nonces", "Nonces that could still be replayed", lambda: float(len(daemon.nonces)))
    gauge("pending_writes", "Writes waiting for the disk", lambda: float(daemon.books.writer.pending))
    gauge("metagraph_age_seconds", "Age of the metagraph in use", lambda: daemon.keeper.age() or 0.0)
