"""The daemon's two web applications: what validators see, and what the operator sees."""

from __future__ import annotations

from typing import Protocol

from fastapi import FastAPI
from starlette.types import ASGIApp

from miner import __version__
from miner.alerts.requests import RequestWatch
from miner.chain.auth import Authenticator, failure_limit
from miner.config_files.what_if import WhatIf
from miner.daemon_client import ensure_operator_token
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
from miner.observe.metrics import Metrics
from miner.offers.service import OfferService
from miner.settings import Settings
from miner.store.database import StoreUnavailable
from miner.support.rate_limits import TokenBuckets

#: More validators' requests at once get 503.
MAX_CONCURRENT_REQUESTS = 256


class ServedDaemon(Protocol):
    """The parts of the daemon that the applications themselves use; each route names those that it needs."""

    settings: Settings
    metrics: Metrics
    authenticator: Authenticator
    offer_service: OfferService
    request_watch: RequestWatch


def public_app(daemon: ServedDaemon) -> ASGIApp:
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
    return RequestMiddleware(app, metrics=daemon.metrics, max_concurrent=MAX_CONCURRENT_REQUESTS)


_OPERATOR_ROUTERS = (
    build_operator_router,
    build_overview_router,
    build_jobs_router,
    build_training_router,
    build_measurements_router,
    build_alerts_router,
    build_offers_router,
    build_reports_router,
    build_config_router,
)


def operator_app(daemon: ServedDaemon) -> FastAPI:
    """What the operator sees."""
    app = _fastapi("god-miner operator")
    app.state.daemon = daemon
    app.state.metrics = daemon.metrics
    try:
        app.state.operator_token = ensure_operator_token(daemon.settings)
    except OSError as error:
        text = f"the operator's token cannot be written to {daemon.settings.data_dir} ({error.strerror})"
        raise StoreUnavailable(f"{text}; free disk space, or set OPERATOR_TOKEN") from None
    app.state.operator_failures = TokenBuckets(failure_limit())
    app.state.what_if = WhatIf()
    for build_router in _OPERATOR_ROUTERS:
        app.include_router(build_router())
    return app


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
