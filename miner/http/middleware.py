"""The first checks of every public request: the limit on concurrent requests, metrics, one access line.

It wraps the application, so that a request refused here never reaches routing. Sizes and times are limited
before this, on the socket (`limits.py`). Signed routes without path parameters are called from here:
FastAPI's middleware and routing would only find the same route.
"""

from __future__ import annotations

import asyncio
import logging
import time

from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from miner.http.errors import CLIENT_GONE, ServerBusy, ServerStopping, error_reply
from miner.http.subnet import SignedRoute
from miner.observe.metrics import Metrics

access_log = logging.getLogger("miner.access")


class RequestMiddleware:
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
