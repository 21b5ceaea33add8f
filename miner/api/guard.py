"""What every public request passes first: size, time and concurrency limits, metrics, one access line.

Plain ASGI, outside the application: a request that is refused here never reaches routing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from core.errors import GodMinerError
from miner.metrics import Metrics

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

access_log = logging.getLogger("miner.access")

MAX_HEADERS = 64
MAX_HEADER_BYTES = 16 * 1024


class ClosesConnection(GodMinerError):
    """The rest of the request is not worth reading: the connection is closed with the reply."""

    code = "request_refused"


class BodyTooLarge(ClosesConnection):
    code = "body_too_large"


class BodyTooSlow(ClosesConnection):
    code = "body_too_slow"


class HeadersTooLarge(ClosesConnection):
    code = "headers_too_large"


class Busy(ClosesConnection):
    code = "busy"


class ClientGone(Exception):
    """The client hung up while it was still sending; there is nobody to reply to."""


class Guard:
    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        reply: Callable[[GodMinerError], Any],
        max_body_bytes: int,
        body_timeout: float,
        max_concurrent: int,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._reply = reply
        self._max_body = max_body_bytes
        self._body_timeout = body_timeout
        self._max_concurrent = max_concurrent
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._running += 1
        try:
            await self._pass(scope, receive, noting)
        except ClientGone:
            status = 499  # nginx's number for it: the client closed the request
        finally:
            self._running -= 1
            self._note(scope, status, time.perf_counter() - started)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
        except GodMinerError as error:
            await self._reply(error)(scope, receive, send)
        else:
            await self._app(scope, self._limited(receive), send)

    def _check(self, scope: Scope) -> None:
        if self._running > self._max_concurrent:
            raise Busy(f"{self._max_concurrent} requests are being answered already; try again")
        headers = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            raise HeadersTooLarge(
                f"{len(headers)} headers of {size} bytes; "
                f"at most {MAX_HEADERS} of {MAX_HEADER_BYTES} are taken"
            )
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and int(value[:20]) > self._max_body:
                raise self._too_large(value[:20].decode())

    def _limited(self, receive: Receive) -> Receive:
        """Count the body and give it one deadline as a whole: a byte every second is slow too."""
        got = 0
        deadline: float | None = None
        loop = asyncio.get_running_loop()

        async def limited() -> Message:
            nonlocal got, deadline
            if deadline is None:
                deadline = loop.time() + self._body_timeout
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise BodyTooSlow(f"the body was not here after {self._body_timeout:g} s") from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            got += len(message.get("body", b""))
            if got > self._max_body:
                raise self._too_large(f"over {self._max_body}")
            return message

        return limited

    def _too_large(self, size: str) -> BodyTooLarge:
        return BodyTooLarge(f"the body has {size} bytes; at most {self._max_body} are taken")

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "other")
        self._metrics.request(path, status, seconds)
        client = scope.get("client")
        access_log.info(
            "%s %s %d %.1f ms %s",
            scope["method"],
            scope["path"][:200],
            status,
            seconds * 1000,
            client[0] if client else "-",
        )
