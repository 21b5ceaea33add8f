"""HTTP/1.1 on the socket: uvicorn's parser with the bounds it lacks.

uvicorn limits neither the size of headers nor of bodies, nor the time that either may take, nor how many
requests one connection may queue, nor how long its replies may lie unread: a stranger could hold
connections open, or fill memory, without ever sending a request. All of that is judged here, byte by byte
as it arrives, so that the application sees only requests of a decent size, and a request that arrives in
one piece, as nearly all do, starts no timer of ours. Refusals are JSON like every other reply, and a
refusal waits for the replies to the requests before it: a client takes what comes first for the answer to
its first.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from miner.limits import network_of

MAX_HEADERS = 64
MAX_HEADER_BYTES = 16 * 1024
#: Requests that one connection may send ahead of their replies. Each takes two kilobytes for a stranger's
#: twenty bytes.
MAX_QUEUED = 32
#: How long a connection that lies idle when the daemon stops may still send a request.
DRAIN_SECONDS = 1.0
#: How long what a client still sends is read away after its answer.
LINGER_SECONDS = 1.0


@dataclass(frozen=True)
class WireLimits:
    header_seconds: float
    #: Also for the client to take a reply.
    body_seconds: float
    max_body_bytes: int
    max_connections: int
    max_connections_per_address: int = 256


class _Phase(Enum):
    #: Between two requests: uvicorn's keep-alive time runs once all are answered.
    IDLE = "idle"
    HEADERS = "headers"
    BODY = "body"


class _Stop(Exception):
    """Keeps the parser from what follows a refused request."""


class _Unhurried:
    """What uvicorn takes for the transport: it is closed as `BoundedProtocol.hang_up` says."""

    __slots__ = ("_protocol", "_transport")

    def __init__(self, transport: asyncio.Transport, protocol: BoundedProtocol) -> None:
        self._transport, self._protocol = transport, protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._protocol.lingers or self._transport.is_closing()

    def close(self) -> None:
        self._protocol.hang_up(self._transport)


class BoundedProtocol(HttpToolsProtocol):
    limits: ClassVar[WireLimits]
    #: Open connections by network address.
    callers: ClassVar[Counter[str]] = Counter()

    _network = ""
    #: The first request's time runs from the start of the connection.
    _phase = _Phase.HEADERS
    #: Requests begun and done with, and those whose replies are due.
    _requests = 0
    _due = 0
    #: Of the request at hand, as they came.
    _bytes = 0
    _body_bytes = 0
    _timer: asyncio.TimerHandle | None = None
    #: What the timer is for.
    _timed: tuple[int, _Phase] | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    #: Nothing more is read; the connection ends with the replies that are due and this refusal, if any.
    _is_ending = False
    _refusal = b""
    #: When it was opened, and whether the daemon is being stopped.
    _since = 0.0
    _drains = False
    #: Our side is closed, and what still comes is read away.
    lingers = False
    _dropped = 0
    _end_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = _Unhurried(transport, self)  # type: ignore[assignment]
        self._since = self.loop.time()
        self._network = network_of(self.client[0]) if self.client else ""
        self.callers[self._network] += 1
        if len(self.connections) > self.limits.max_connections and not self._make_way():
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "busy", "too many open connections; try again")
        elif self.callers[self._network] > self.limits.max_connections_per_address:
            # One address that opened all there are, and sent nothing, would shut every validator out.
            text = f"{self.limits.max_connections_per_address} connections are open from this address already"
            self._refuse(HTTPStatus.TOO_MANY_REQUESTS, "too_many_connections", text)
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_unread_timer()
        if self._end_timer is not None:
            self._end_timer.cancel()
        self.callers[self._network] -= 1
        if not self.callers[self._network]:
            del self.callers[self._network]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """In place of uvicorn's, which logs a warning for whatever a stranger sends."""
        if self.lingers:
            self._dropped += len(data)
            if self._dropped > self.limits.max_body_bytes:
                self.transport.abort()
        if self._is_ending or self.transport.is_closing():
            return
        self._bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Answered as the plain request that it also is. What follows it is not HTTP any more.
            self._end()
        except httptools.HttpParserError:
            self._refuse(HTTPStatus.BAD_REQUEST, "not_http", "this is not a valid HTTP request")
        else:
            self._judge_size()
            self._watch()

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client may close its side and wait for its answers; False closes the other side, too."""
        if self.lingers or (self._phase is _Phase.BODY and not self._is_ending):
            return False
        self._end()
        return not self.transport.is_closing()

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        self._phase = _Phase.HEADERS
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """As uvicorn's does, which would be a second call for every header."""
        if self._phase is _Phase.BODY:  # trailers come too late to be headers
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        size, length = len(self.url), b""
        for name, value in self.headers:
            size += len(name) + len(value)
            if name == b"content-length" and not length:
                length = value
        if len(self.headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            self._refuse_headers(f"{len(self.headers)} headers of {size} bytes")
            raise _Stop
        length = length.lstrip(b"0")[:20]
        if length.isdigit() and int(length) > self.limits.max_body_bytes:
            self._refuse_body(length.decode())
            raise _Stop
        if self.parser.should_upgrade() and (
            length or any(h[0] == b"transfer-encoding" for h in self.headers)
        ):
            # The parser takes what follows for another protocol, so that the body would be lost.
            text = "this miner speaks HTTP/1.1 only; send a body without an Upgrade header"
            self._refuse(HTTPStatus.BAD_REQUEST, "no_upgrade", text)
            raise _Stop
        if len(self.pipeline) >= MAX_QUEUED:
            text = f"{MAX_QUEUED} requests wait on this connection already; send more when they are answered"
            self._refuse(HTTPStatus.TOO_MANY_REQUESTS, "too_many_queued", text)
            raise _Stop
        super().on_headers_complete()
        self._phase, self._body_bytes = _Phase.BODY, 0
        self._due += 1
        if self._drains:
            self.cycle.keep_alive = False

    def _has(self, header: bytes) -> bool:
        return any(name == header for name, _ in self.headers)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self.limits.max_body_bytes:  # a chunked body tells no length beforehand
            self._refuse_body(f"over {self.limits.max_body_bytes}")
            raise _Stop
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._phase, self._bytes = _Phase.IDLE, 0
        self._requests += 1
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._due -= 1
        super().on_response_complete()
        if self.transport.is_closing():
            self._bound_unread()
        elif self._is_ending:
            self._end()
        else:
            self._watch()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def shutdown(self) -> None:
        """The daemon stops. A client that has just written its next request would lose it to a reset: it is
        answered, as the last one."""
        self._drains = True
        if self._due:
            self.cycle.keep_alive = False
        elif not self._is_ending:
            self._unset_keepalive_if_required()
            self._end_timer = self.loop.call_later(DRAIN_SECONDS, self._end_idle)

    def _end_idle(self) -> None:
        if not self._due and not self._is_ending:
            self._end()

    def hang_up(self, transport: asyncio.Transport) -> None:
        """Close the connection; while a request is still coming in, our side first. What lies unread makes a
        reset of a close, and a reset can overtake the reply."""
        if self.lingers or transport.is_closing():
            return
        if self._phase is _Phase.IDLE or not self._bytes:
            transport.close()
            return
        self.lingers = True
        self._stop_timer()
        transport.write_eof()
        self.flow.resume_reading()
        self._end_timer = self.loop.call_later(LINGER_SECONDS, transport.close)

    def _make_way(self) -> bool:
        """Hang up on a connection that nothing has been asked on, of the address that has most of them, the
        oldest first: connections that only lie there shut no validator out. False: there is none."""
        idle = [one for one in self.connections if isinstance(one, BoundedProtocol) and one._waits_for_client]
        victim = max(idle, key=lambda one: (self.callers[one._network], -one._since), default=self)
        if victim is self:
            return False
        if victim._phase is _Phase.IDLE:
            victim._end()
            return True
        victim._bytes = 0  # its place is needed now: what it still sends is not read away
        victim._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "busy", "too many open connections; try again")
        return True

    @property
    def _waits_for_client(self) -> bool:
        return not self._is_ending and (self._due == 0 or self._phase is _Phase.BODY)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._bound_unread()

    def resume_writing(self) -> None:
        self._stop_unread_timer()
        super().resume_writing()

    @staticmethod
    def note_refusal(status: int) -> None:
        """For the metrics; see `protocol`."""

    def _judge_size(self) -> None:
        """What no callback of the parser tells: headers without an end, and what surrounds chunks."""
        if self._phase is _Phase.HEADERS and self._bytes > MAX_HEADER_BYTES:
            self._refuse_headers(f"over {MAX_HEADER_BYTES} bytes of headers")
        elif self._phase is _Phase.BODY and self._bytes > MAX_HEADER_BYTES + 2 * self.limits.max_body_bytes:
            self._refuse_body(f"with what surrounds it, {self._bytes}")

    def _watch(self) -> None:
        """Bound the time of what is waited for now."""
        if self._phase is _Phase.IDLE:
            self._stop_timer()
            if self._due == 0 and self.timeout_keep_alive_task is None:
                # Its reply went out before its body was here, so uvicorn's own has come and gone.
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
            return
        self._unset_keepalive_if_required()
        if self._timed != (self._requests, self._phase):
            self._stop_timer()
            is_body = self._phase is _Phase.BODY
            seconds = self.limits.body_seconds if is_body else self.limits.header_seconds
            self._timed = (self._requests, self._phase)
            self._timer = self.loop.call_later(seconds, self._too_slow)

    def _stop_timer(self) -> None:
        self._timed = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        if self.flow.read_paused:  # it waits for us, not we for it
            self._stop_timer()
            self._watch()
            return
        what = self._phase.value
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"{what}_too_slow", f"the {what} did not arrive in time")

    def _bound_unread(self) -> None:
        """A client that takes no replies holds their memory, and a closed connection waits for it."""
        if self._unread_timer is None and self.transport.get_write_buffer_size():
            self._unread_timer = self.loop.call_later(self.limits.body_seconds, self.transport.abort)

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _refuse_headers(self, what: str) -> None:
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        allowed = f"at most {MAX_HEADERS} of {MAX_HEADER_BYTES} bytes are taken"
        self._refuse(status, "headers_too_large", f"{what}; {allowed}")

    def _refuse_body(self, size: str) -> None:
        status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        allowed = f"at most {self.limits.max_body_bytes} are taken"
        self._refuse(status, "body_too_large", f"the body has {size} bytes; {allowed}")

    def _refuse(self, status: HTTPStatus, code: str, message: str) -> None:
        """Answer, once the requests before this one are answered, and hang up."""
        if self._is_ending:
            return
        self.note_refusal(status)
        if self._phase is not _Phase.BODY or self._drop_cycle():
            body = json.dumps({"error": code, "message": message}).encode()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            self._refusal = STATUS_LINE[status] + head % len(body) + body
        self._end()

    def _drop_cycle(self) -> bool:
        """Take the request at hand, whose body is at fault, from the application. False if it has its reply
        already, or part of it."""
        cycle = self.cycle
        if cycle.response_started:
            return False
        if self.pipeline and self.pipeline[0][0] is cycle:  # the newest stands first
            self.pipeline.popleft()
        cycle.disconnected = True
        cycle.message_event.set()
        self._due -= 1
        return True

    def _end(self) -> None:
        """Read nothing more, and hang up once what is due is out."""
        self._is_ending = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        if self._due == 0:
            self.transport.write(self._refusal)
            self._close()
        elif not self._refusal:
            self.cycle.keep_alive = False  # so that the last reply says so

    def _close(self) -> None:
        self.transport.close()
        self._bound_unread()


def protocol(limits: WireLimits, on_refusal: Callable[[int], None]) -> type[HttpToolsProtocol]:
    """The protocol class with an operator's limits; uvicorn makes the instances itself."""
    members = {"limits": limits, "callers": Counter(), "note_refusal": staticmethod(on_refusal)}
    return type("LimitedProtocol", (BoundedProtocol,), members)
