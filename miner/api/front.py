"""What every public request passes first: the concurrency limit, metrics, one access line.

Plain ASGI, outside the application, so that a request turned away here never reaches routing. Sizes and
times are bounded before this, on the socket (`protocol.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.errors import GodMinerError
from miner.metrics import Metrics

#: Answers a request and tells the status that it answered with.
Shortcut = Callable[[Scope, Receive, Send], Awaitable[int]]

access_log = logging.getLogger("miner.access")

#: nginx's number for it: the client hung up before it was answered.
CLIENT_GONE = 499


class Busy(GodMinerError):
    code = "busy"


class ClientGone(Exception):
    """The client hung up while it was still sending; there is nobody to reply to."""


class Front:
    def __init__(
        self,
        app: ASGIApp,
        *,
        shortcuts: Mapping[str, Shortcut],
        on_error: Callable[[GodMinerError], ASGIApp],
        metrics: Metrics,
        max_concurrent: int,
    ) -> None:
        self._app = app
        self._shortcuts = shortcuts
        self._on_error = on_error
        self._metrics = metrics
        self._max_concurrent = max_concurrent
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = CLIENT_GONE
        self._running += 1
        try:
            status = await self._pass(scope, receive, send)
        except ClientGone:
            pass
        finally:
            self._running -= 1
            self._note(scope, status, time.perf_counter() - started)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> int:
        if self._running > self._max_concurrent:
            busy = Busy(f"{self._max_concurrent} requests are being answered already; try again")
            return await _status_of(self._on_error(busy), scope, receive, send)

        async def receive_outside() -> Message:
            """Waiting for a body takes no place: whose hotkeys are validators' is public, and with such
            headers and no body behind them a stranger could hold every place for the body's whole time."""
            self._running -= 1
            try:
                return await receive()
            finally:
                self._running += 1

        shortcut = self._shortcuts.get(scope["path"])
        if shortcut is not None:
            return await shortcut(scope, receive_outside, send)
        return await _status_of(self._app, scope, receive_outside, send)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope.get("route")
        self._metrics.request(getattr(route, "path", "other"), status, seconds)
        if access_log.isEnabledFor(logging.INFO):
            client = scope["client"][0] if scope["client"] else "-"
            path = scope["path"][:200]
            access_log.info("%s %s %d %.1f ms %s", scope["method"], path, status, seconds * 1000, client)


async def _status_of(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> int:
    status = CLIENT_GONE

    async def noting(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        await send(message)

    await app(scope, receive, noting)
    return status
