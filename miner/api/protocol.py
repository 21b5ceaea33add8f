"""HTTP/1.1 on the socket: uvicorn's parser with the two bounds it lacks.

uvicorn neither limits the headers' size while they arrive nor the time they may take: a stranger could
hold connections open, or fill memory, without ever sending a request. Requests that are no HTTP at all are
answered in JSON like everything else.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from miner.api.guard import MAX_HEADER_BYTES


class BoundedProtocol(HttpToolsProtocol):
    #: Set by `bounded`.
    header_timeout: ClassVar[float] = 5.0
    max_connections: ClassVar[int] = 1024

    _header_timer: asyncio.TimerHandle | None = None
    _header_bytes = 0
    _in_headers = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(503, "busy", f"{self.max_connections} connections are open already; try again")
            return
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_headers:
            if self._header_timer is None:
                self._start_header_timer()
            self._header_bytes += len(data)
        super().data_received(data)
        # Counted by what is unparsed: one packet may hold the headers and the start of a large body.
        if self._in_headers and self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse(431, "headers_too_large", f"the headers are over {MAX_HEADER_BYTES} bytes")

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_header_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        # The next request of this connection may take its time to begin (the keep-alive timeout bounds
        # that), but not to finish its headers once begun.
        self._in_headers = True
        self._header_bytes = 0

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "not_http", "this is not a valid HTTP request")

    def _expect_headers(self) -> None:
        self._in_headers = True
        self._header_bytes = 0
        self._start_header_timer()

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.header_timeout, self._headers_too_slow)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_too_slow(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            self._refuse(408, "headers_too_slow", f"no complete headers after {self.header_timeout:g} s")

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._stop_header_timer()
        body = json.dumps({"error": code, "message": message}).encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()


def bounded(*, header_timeout: float, max_connections: int) -> type[HttpToolsProtocol]:
    """The protocol class with an operator's limits; uvicorn makes the instances itself."""
    limits: dict[str, Any] = {"header_timeout": header_timeout, "max_connections": max_connections}
    return type("BoundedProtocol", (BoundedProtocol,), limits)
