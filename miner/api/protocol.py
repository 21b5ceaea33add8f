"""HTTP/1.1 on the socket: uvicorn's parser with the bounds it lacks.

uvicorn limits neither the size of headers nor of bodies, nor the time that either may take: a stranger
could hold connections open, or fill memory, without ever sending a request. All of that is judged here,
byte by byte as it arrives, so that the application sees only requests of a decent size, and a request that
arrives in one piece, as nearly all do, starts no timer at all. Refusals are JSON like every other reply.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEADERS = 64
MAX_HEADER_BYTES = 16 * 1024


@dataclass(frozen=True)
class WireLimits:
    header_seconds: float
    body_seconds: float
    max_body_bytes: int
    max_connections: int


class _Phase(Enum):
    HEADERS = "headers"
    BODY = "body"


class BoundedProtocol(HttpToolsProtocol):
    limits: ClassVar[WireLimits]

    _phase = _Phase.HEADERS
    _unparsed = 0
    _body_bytes = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "busy", "too many open connections; try again")
        else:
            self._time(self.limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        phase = self._phase
        self._unparsed += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._phase is _Phase.BODY:
            if phase is _Phase.HEADERS:
                self._time(self.limits.body_seconds)
        elif self._unparsed > MAX_HEADER_BYTES:
            self._refuse_headers(f"over {MAX_HEADER_BYTES} bytes of headers")
        elif self._unparsed and self._timer is None:
            self._time(self.limits.header_seconds)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._phase, self._body_bytes = _Phase.BODY, 0
        size = sum(len(name) + len(value) for name, value in self.headers)
        if len(self.headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            self._refuse_headers(f"{len(self.headers)} headers of {size} bytes")
            return
        length = next((value for name, value in self.headers if name == b"content-length"), b"0")
        if length.isdigit() and int(length[:20]) > self.limits.max_body_bytes:
            self._refuse_body(length[:20].decode())
            return
        if not self.begin_request(int(length[:20]) if length.isdigit() else 0):
            super().on_headers_complete()

    def begin_request(self, length: int) -> bool:
        """Whether this request is taken out of uvicorn's hands; `express.py` says which are."""
        return False

    def end_request(self) -> None:
        self._stop_timer()
        # The next request of this connection may take its time to begin (the keep-alive timeout bounds
        # that), but not to get its headers across once begun.
        self._phase, self._unparsed = _Phase.HEADERS, 0

    def on_body(self, body: bytes) -> None:
        if self.transport.is_closing():
            return
        self._body_bytes += len(body)
        if self._body_bytes > self.limits.max_body_bytes:  # a chunked body tells no length beforehand
            self._refuse_body(f"over {self.limits.max_body_bytes}")
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.transport.is_closing():
            return
        self.end_request()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, "not_http", "this is not a valid HTTP request")

    @staticmethod
    def note_refusal(status: int) -> None:
        """For the metrics; see `express.protocol`."""

    def _time(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        code = f"{self._phase.value}_too_slow"
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, code, f"the {self._phase.value} did not arrive in time")

    def _refuse_headers(self, what: str) -> None:
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        allowed = f"at most {MAX_HEADERS} of {MAX_HEADER_BYTES} bytes are taken"
        self._refuse(status, "headers_too_large", f"{what}; {allowed}")

    def _refuse_body(self, size: str) -> None:
        status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        allowed = f"at most {self.limits.max_body_bytes} are taken"
        self._refuse(status, "body_too_large", f"the body has {size} bytes; {allowed}")

    def _refuse(self, status: HTTPStatus, code: str, message: str) -> None:
        """Answer and hang up. An answer that is under way already is not written into."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = json.dumps({"error": code, "message": message}).encode()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        self.transport.close()
        self.note_refusal(status)
