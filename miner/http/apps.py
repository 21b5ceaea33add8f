"""The daemon's two web applications: what validators see, and what the operator sees."""

from __future__ import annotations

import asyncio
from typing import Protocol, get_args

from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.types import ASGIApp

from miner import __version__
from miner.alerts.requests import RequestWatch
from miner.chain.auth import failure_limit
from miner.config_files.what_if import WhatIf
from miner.daemon_client import ensure_operator_token
from miner.http import alerts, jobs, offers, overview
from miner.http.errors import install_error_handlers
from miner.http.middleware import RequestMiddleware
from miner.http.operator import OperatorDaemon, operator_only
from miner.http.subnet import add_routes
from miner.store.database import StoreUnavailable
from miner.support.rate_limits import TokenBuckets

#: More validators' requests at once get 503.
MAX_CONCURRENT_REQUESTS = 256

OPERATOR_ROUTERS = (overview.router, jobs.router, offers.router, alerts.router)


class ServedDaemon(OperatorDaemon, Protocol):
    """The parts of the daemon that both applications use."""

    request_watch: RequestWatch


def public_app(daemon: ServedDaemon) -> ASGIApp:
    """Build the application that validators see."""
    # No redirects from '/task_offer' to '/task_offer/' (a redirected POST is lost by most clients), and no
    # schema page: strangers have no business reading it.
    app = _fastapi("god-miner")
    app.state.authenticator = daemon.authenticator
    app.state.offer_service = daemon.offer_service
    app.state.request_watch = daemon.request_watch

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Answer as long as the daemon does; with nothing that a stranger could use."""
        return {"status": "ok", "version": __version__}

    add_routes(app)
    return RequestMiddleware(app, metrics=daemon.metrics, max_concurrent=MAX_CONCURRENT_REQUESTS)


def operator_app(daemon: ServedDaemon) -> FastAPI:
    """Build the application that the operator sees."""
    app = _fastapi("god-miner operator")
    app.state.daemon = daemon
    try:
        app.state.operator_token = ensure_operator_token(daemon.settings)
    except OSError as error:
        text = f"the operator's token cannot be written to {daemon.settings.data_dir} ({error.strerror})"
        raise StoreUnavailable(f"{text}; free disk space, or set OPERATOR_TOKEN") from None
    app.state.operator_failures = TokenBuckets(failure_limit())
    app.state.what_if, app.state.saving = WhatIf(), asyncio.Lock()
    for router in OPERATOR_ROUTERS:
        app.include_router(router)

    @app.get("/openapi.json", dependencies=[Depends(operator_only)], include_in_schema=False)
    async def openapi() -> JSONResponse:
        """Describe every route and record."""
        return JSONResponse(await asyncio.to_thread(app.openapi))

    @app.get("/docs", dependencies=[Depends(operator_only)], include_in_schema=False)
    async def docs() -> PlainTextResponse:
        """List the routes as text: no browser sends the token."""
        return PlainTextResponse(api_page(), media_type="text/markdown")

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


# The page of the routes


_API_HEAD = """# API

The routes of the operator's port ([operations.md](operations.md#the-operators-port)). Records are classes of
`miner/api`. `GET /openapi.json` describes every field, `GET /docs` is this page; both take the token too.

| route | what | record |
|---|---|---|
"""


def api_page() -> str:
    """Return docs/api.md: every route of the operator's port and its record."""
    routes = [route for router in OPERATOR_ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    return _API_HEAD + "".join(map(_api_row, routes))


def _api_row(route: APIRoute) -> str:
    query = "&".join(f"{field.alias}=" for field in route.dependant.query_params)
    method, path = ", ".join(route.methods or ()), f"{route.path}?{query}" if query else route.path
    what = " ".join((route.endpoint.__doc__ or "").split()).replace("|", "\\|")
    sent = [_record_name(field.field_info.annotation) for field in route.dependant.body_params]
    records = " → ".join(f"`{name}`" for name in (*sent, _record_name(route.response_model)) if name)
    return f"| `{method} {path}` | {what} | {records} |\n"


def _record_name(record: object) -> str:
    """The name of a record, also of one that may be left out."""
    kinds = (record, *get_args(record))
    models = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return next((model.__name__ for model in models), "")
