"""What every public request passes first: the concurrency limit, metrics, one access line.

Outside the application, so that a request turned away here never reaches routing. Sizes and times are bounded
before this, on the socket (`protocol.py`). There are two ways in: the ASGI call, and for small requests to a
path without parameters the express lane (`express.py`); both end in the same route.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from starlette.datastructures import State
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.errors import GodMinerError
from miner.api.reply import Headers, Reply
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


class ExpressRoute(Protocol):
    """A route that can answer without ASGI."""

    @property
    def path(self) -> str: ...

    async def reply(
        self, state: State, method: str, headers: Headers, read: Callable[[], Awaitable[bytes]], address: str
    ) -> Reply: ...


#: Headers, body and address in, the reply out. Never raises.
Express = Callable[[Headers, bytes, str], Coroutine[Any, Any, Reply]]


class Front:
    def __init__(
        self,
        app: ASGIApp,
        *,
        on_error: Callable[[GodMinerError], Reply],
        metrics: Metrics,
        max_concurrent: int,
    ) -> None:
        self._app = app
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
                await self._app(scope, receive_outside, noting)
        except asyncio.CancelledError:  # only uvicorn does that, and then says "Internal Server Error"
            if status != CLIENT_GONE:
                raise
            late = Stopping("the miner is being stopped, and this request took too long; nothing is promised")
            await self._on_error(late).send(noting)
        finally:
            self._running -= 1
            path = getattr(scope.get("route"), "path", "other")
            address = scope["client"][0] if scope["client"] else "-"
            self._note(scope["method"], path, status, time.perf_counter() - started, address)

    def express(self, route: ExpressRoute, state: State) -> Express:
        """The way in for a POST that has arrived whole."""

        async def answer(headers: Headers, body: bytes, address: str) -> Reply:
            started = time.perf_counter()
            self._running += 1
            try:
                if self._running > self._max_concurrent:
                    reply = self._busy()
                else:
                    reply = await route.reply(state, "POST", headers, _given(body), address)
            finally:
                self._running -= 1
            self._note("POST", route.path, reply.status, time.perf_counter() - started, address)
            return reply

        return answer

    def _busy(self) -> Reply:
        return self._on_error(Busy(f"{self._max_concurrent} requests are being answered already; try again"))

    def _note(self, method: str, route: str, status: int, seconds: float, address: str) -> None:
        # At DEBUG: what matters of a request is logged by who handled it, and strangers could fill the disk.
        self._metrics.request(route, status, seconds)
        if access_log.isEnabledFor(logging.DEBUG):
            access_log.debug("%s %s %d %.1f ms %s", method, route, status, seconds * 1000, address)


def _given(body: bytes) -> Callable[[], Awaitable[bytes]]:
    async def read() -> bytes:
        return body

    return read
