"""The daemon's two web applications: what validators see, and what the operator sees."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol, get_args

from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from miner import __version__
from miner.alerts.request_watch import RequestWatch
from miner.chain.auth import failure_limit
from miner.config_files.what_if import WhatIf
from miner.daemon_client import ensure_operator_token
from miner.http import jobs, offers, overview
from miner.http.errors import CLIENT_GONE, ServerBusy, ServerStopping, error_reply, install_error_handlers
from miner.http.operator import OperatorDaemon, operator_only
from miner.http.subnet import SignedRoute, add_routes
from miner.observe.metrics import Metrics
from miner.store.database import StoreUnavailable
from miner.support.rate_limits import TokenBuckets

access_log = logging.getLogger("miner.access")


class RequestMiddleware:
    """The first checks of every public request: the limit on concurrent ones, metrics, one access line.

    It wraps the application, so that a request refused here never reaches routing. Sizes and times are
    limited before this, on the socket (`limits.py`). Signed routes without path parameters are called from
    here: FastAPI's middleware and routing would only find the same route.
    """

    def __init__(self, app: FastAPI, *, metrics: Metrics, max_concurrent: int) -> None:
        self._app = app
        self._metrics = metrics
        self._max_concurrent = max_concurrent
        self._active = 0
        routes = [route for route in app.router.routes if isinstance(route, SignedRoute)]
        self._signed_routes = {route.path: route for route in routes if not route.param_convertors}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, started = CLIENT_GONE, time.perf_counter()

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        async def receive_uncounted() -> Message:
            """Waiting for a body takes no place: whose hotkeys are validators' is public, and with such
            headers and no body behind them a stranger could hold every place for the body's whole time."""
            self._active -= 1
            try:
                return await receive()
            finally:
                self._active += 1

        self._active += 1
        try:
            if self._active > self._max_concurrent:
                text = f"{self._max_concurrent} requests are being answered already; try again"
                await error_reply(ServerBusy(text)).send(send_noting_status)
            else:
                await self._answer(scope, receive_uncounted, send_noting_status)
        except asyncio.CancelledError:  # only uvicorn does that, and then says "Internal Server Error"
            if status != CLIENT_GONE:
                raise
            text = "the miner is being stopped, and this request took too long; nothing is accepted"
            await error_reply(ServerStopping(text)).send(send_noting_status)
        finally:
            self._active -= 1
            self._record(scope, status, time.perf_counter() - started)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (route := self._signed_routes.get(scope["path"])) is None:
            await self._app(scope, receive, send)
            return
        scope["app"], scope["route"] = self._app, route
        await route.handle(scope, receive, send)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.count_request(route, status, seconds)
        # At DEBUG: what matters of a request is logged by who handled it, and strangers could fill the disk.
        if access_log.isEnabledFor(logging.DEBUG):
            address = scope["client"][0] if scope["client"] else "-"
            access_log.debug("%s %s %d %.1f ms %s", scope["method"], route, status, seconds * 1000, address)


#: More validators' requests at once get 503.
MAX_CONCURRENT_REQUESTS = 256

OPERATOR_ROUTERS = (overview.router, jobs.router, offers.router)


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
