"""What every public request passes first: the concurrency limit, metrics, one access line.

Outside the application, so that a request turned away here never reaches routing. Sizes and times are bounded
before this, on the socket (`protocol.py`). A signed route without parameters in its path is called from here:
FastAPI's middleware and routing would only find the same route.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.errors import GodMinerError
from miner.api.reply import Reply
from miner.metrics import Metrics

access_log = logging.getLogger("miner.access")

#: nginx's number for it: the client hung up before it was answered.
CLIENT_GONE = 499


class Busy(GodMinerError):
    code = "busy"


class Stopping(GodMinerError):
    """The grace of a stop is over, and this request is not."""

    code = "stopping"


class ClientGone(Exception):
    """The client hung up while it was still sending; there is nobody to reply to."""


class Front:
    def __init__(
        self,
        app: ASGIApp,
        direct: Mapping[str, ASGIApp],
        *,
        on_error: Callable[[GodMinerError], Reply],
        metrics: Metrics,
        max_concurrent: int,
    ) -> None:
        """`direct`: what is called without the application, by path."""
        self._app = app
        self._direct = direct
        self._on_error = on_error
        self._metrics = metrics
        self._max_concurrent = max_concurrent
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, started = CLIENT_GONE, time.perf_counter()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        async def receive_outside() -> Message:
            """Waiting for a body takes no place: whose hotkeys are validators' is public, and with such
            headers and no body behind them a stranger could hold every place for the body's whole time."""
            self._running -= 1
            try:
                return await receive()
            finally:
                self._running += 1

        self._running += 1
        try:
            if self._running > self._max_concurrent:
                await self._busy().send(noting)
            else:
                app = self._direct.get(scope["path"], self._app)
                await app(scope, receive_outside, noting)
        except asyncio.CancelledError:  # only uvicorn does that, and then says "Internal Server Error"
            if status != CLIENT_GONE:
                raise
            late = Stopping("the miner is being stopped, and this request took too long; nothing is promised")
            await self._on_error(late).send(noting)
        finally:
            self._running -= 1
            self._note(scope, status, time.perf_counter() - started)

    def _busy(self) -> Reply:
        return self._on_error(Busy(f"{self._max_concurrent} requests are being answered already; try again"))

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        # At DEBUG: what matters of a request is logged by who handled it, and strangers could fill the disk.
        self._metrics.request(route, status, seconds)
        if access_log.isEnabledFor(logging.DEBUG):
            address = scope["client"][0] if scope["client"] else "-"
            access_log.debug("%s %s %d %.1f ms %s", scope["method"], route, status, seconds * 1000, address)
