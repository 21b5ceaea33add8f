"""HTTP/1.1 on the socket: uvicorn's parser with the limits it lacks.

uvicorn limits neither the size of headers nor of bodies, nor the time that either may take, nor how many
requests one connection may queue, nor how long its replies may lie unread: a stranger could hold
connections open, or fill memory, without ever sending a request. All of that is checked here, as the bytes
arrive. A request that arrives in one piece, as nearly all do, starts no timer of ours. Refusals are JSON
like every other reply, and a refusal waits for the replies to the requests before it: a client takes the
first reply for the answer to its first request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from miner.http.places import Places
from miner.support.addresses import client_network

MAX_HEADERS = 64
MAX_HEADER_BYTES = 16 * 1024
#: How many requests one connection may send ahead of their replies. Each takes two kilobytes of memory for a
#: stranger's twenty bytes.
MAX_QUEUED = 32
#: How long a connection that is idle when the daemon stops may still send a request.
DRAIN_SECONDS = 1.0
#: How long, after its reply, a client's further bytes are read and dropped.
LINGER_SECONDS = 1.0


@dataclass(frozen=True)
class HttpLimits:
    header_seconds: float
    #: Also the time that a client has to read a reply.
    body_seconds: float
    max_body_bytes: int
    #: Separate limits for known clients and for strangers: strangers never take the places of known clients.
    max_known_connections: int
    max_stranger_connections: int
    max_connections_per_address: int = 256


#: Tells a known client from a stranger, by its network and the headers of its request, which are empty before
#: it has sent one.
IsKnown = Callable[[str, Iterable[tuple[bytes, bytes]]], bool]


class _ReadPhase(Enum):
    #: Between two requests: uvicorn's keep-alive time runs once all are answered.
    IDLE = "idle"
    HEADERS = "headers"
    BODY = "body"


class _StopParsing(Exception):
    """Stops the parser: what follows a refused request is not read."""


class _LingeringTransport:
    """The transport as uvicorn gets it: closing it goes through `BoundedProtocol.hang_up`."""

    __slots__ = ("_protocol", "_transport")

    def __init__(self, transport: asyncio.Transport, protocol: BoundedProtocol) -> None:
        self._transport, self._protocol = transport, protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._protocol.is_lingering or self._transport.is_closing()

    def close(self) -> None:
        self._protocol.hang_up(self._transport)


class BoundedProtocol(HttpToolsProtocol):
    limits: ClassVar[HttpLimits]
    strangers: ClassVar[Places[BoundedProtocol]]
    known: ClassVar[Places[BoundedProtocol]]

    #: The one of the two in which this connection has a place.
    _places: Places[BoundedProtocol]
    _network = ""
    #: The time limit of the first request's headers runs from the start of the connection.
    _phase = _ReadPhase.HEADERS
    #: Requests received so far, and those that are not answered yet.
    _requests = 0
    _pending_replies = 0
    #: Bytes of the current request, on the socket and of its body.
    _bytes = 0
    _body_bytes = 0
    _timer: asyncio.TimerHandle | None = None
    #: Which request and phase the timer is for.
    _timer_purpose: tuple[int, _ReadPhase] | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    #: Nothing more is read; the connection ends with the pending replies and this refusal, if any.
    _is_ending = False
    _refusal = b""
    #: The daemon is being stopped.
    _is_draining = False
    #: Our side is closed, and what the client still sends is read and dropped.
    is_lingering = False
    _dropped = 0
    _end_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = _LingeringTransport(transport, self)  # type: ignore[assignment]
        self._network = client_network(self.client[0]) if self.client else ""
        self._take_place(self.known if self.is_known(self._network, ()) else self.strangers)
        if not self._is_ending:
            self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_unread_timer()
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._places.leave(self, self._network)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Replaces uvicorn's, which logs a warning for whatever a stranger sends."""
        if self.is_lingering:
            self._dropped += len(data)
            if self._dropped > self.limits.max_body_bytes:
                self.transport.abort()
        if self._is_ending or self.transport.is_closing():
            return
        self._bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Answered as the plain request that it also is. What follows it is no longer HTTP.
            self._end()
        except httptools.HttpParserError:
            self._refuse(HTTPStatus.BAD_REQUEST, "not_http", "this is not a valid HTTP request")
        else:
            self._check_size()
            self._update_timer()

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client may close its side and wait for its replies. False closes our side, too."""
        if self.is_lingering or (self._phase is _ReadPhase.BODY and not self._is_ending):
            return False
        self._end()
        return not self.transport.is_closing()

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        self._phase = _ReadPhase.HEADERS
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Replaces uvicorn's: calling it would be a second call for every header."""
        if self._phase is _ReadPhase.BODY:  # trailers come too late to be headers
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        size, length, hosts = len(self.url), b"", 0
        for name, value in self.headers:
            size += len(name) + len(value)
            if name == b"content-length" and not length:
                length = value
            elif name == b"host":
                hosts += 1
        if len(self.headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            self._refuse_headers(f"{len(self.headers)} headers of {size} bytes")
            raise _StopParsing
        length = length.lstrip(b"0")[:20]
        if length.isdigit() and int(length) > self.limits.max_body_bytes:
            self._refuse_body(length.decode())
            raise _StopParsing
        if hosts > 1:  # RFC 9112, 3.2; proxies differ in which one they read
            self._refuse(
                HTTPStatus.BAD_REQUEST, "two_hosts", "the header 'host' is given twice; send it once"
            )
            raise _StopParsing
        if self.parser.should_upgrade() and (
            length or any(h[0] == b"transfer-encoding" for h in self.headers)
        ):
            # The parser takes what follows for another protocol: the body would be lost.
            text = "this miner speaks HTTP/1.1 only; send a body without an Upgrade header"
            self._refuse(HTTPStatus.BAD_REQUEST, "no_upgrade", text)
            raise _StopParsing
        if len(self.pipeline) >= MAX_QUEUED:
            text = f"{MAX_QUEUED} requests wait on this connection already; send more when they are answered"
            self._refuse(HTTPStatus.TOO_MANY_REQUESTS, "too_many_queued", text)
            raise _StopParsing
        if self._places is self.strangers and self.is_known(self._network, self.headers):
            self.strangers.leave(self, self._network)
            self._take_place(self.known)
            if self._is_ending:
                raise _StopParsing
        super().on_headers_complete()
        self._phase, self._body_bytes = _ReadPhase.BODY, 0
        self._pending_replies += 1
        if self._is_draining:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self.limits.max_body_bytes:  # a chunked body has no length in its headers
            self._refuse_body(f"over {self.limits.max_body_bytes}")
            raise _StopParsing
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._phase, self._bytes = _ReadPhase.IDLE, 0
        self._requests += 1
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._pending_replies -= 1
        super().on_response_complete()
        if self.transport.is_closing():
            self._limit_unread_time()
        elif self._is_ending:
            self._end()
        else:
            self._update_timer()
            self._places.set_idle(self, self._network)

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def shutdown(self) -> None:
        """Stop serving. A client that has just written its next request would lose it to a reset: that
        request is still answered, as the last one."""
        self._is_draining = True
        if self._pending_replies:
            self.cycle.keep_alive = False
        elif not self._is_ending:
            self._unset_keepalive_if_required()
            self._end_timer = self.loop.call_later(DRAIN_SECONDS, self._end_idle)

    def _end_idle(self) -> None:
        if not self._pending_replies and not self._is_ending:
            self._end()

    def hang_up(self, transport: asyncio.Transport) -> None:
        """Close the connection, our side first while a request is still coming in: closing with unread data
        sends a reset, and a reset can overtake the reply."""
        if self.is_lingering or transport.is_closing():
            return
        if self._phase is _ReadPhase.IDLE or not self._bytes:
            transport.close()
            return
        self.is_lingering = True
        self._stop_timer()
        transport.write_eof()
        self.flow.resume_reading()
        self._end_timer = self.loop.call_later(LINGER_SECONDS, transport.close)

    def _take_place(self, places: Places[BoundedProtocol]) -> None:
        """Take a place, and close an idle connection where there are too many: of the same network if that
        has too many, else of the network that has most."""
        self._places = places
        places.enter(self._network)
        if places.is_over_for(self._network):
            if not self._make_room(self._network):
                number = self.limits.max_connections_per_address
                text = f"{number} connections are open from this address already"
                self._refuse(HTTPStatus.TOO_MANY_REQUESTS, "too_many_connections", text)
        elif places.is_over and not self._make_room():
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "busy", "too many open connections; try again")
        if not self._is_ending:
            places.set_idle(self, self._network)

    def _make_room(self, network: str | None = None) -> bool:
        while (other := self._places.oldest_idle(network)) is not None:
            # A connection that is being answered is looked at once, and again when its reply is out.
            self._places.set_busy(other, other._network)
            if other._makes_way():
                return True
        return False

    def _makes_way(self) -> bool:
        """Hang up, unless a request of this connection is being answered."""
        if self._pending_replies and self._phase is not _ReadPhase.BODY:
            return False
        if self._is_ending:
            self.transport.abort()
        elif self._phase is _ReadPhase.IDLE:
            self._end()
        else:
            self._bytes = 0  # its place is needed now: do not linger for what it still sends
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "busy", "too many open connections; try again")
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit_unread_time()

    def resume_writing(self) -> None:
        self._stop_unread_timer()
        super().resume_writing()

    @staticmethod
    def on_refusal(status: int) -> None:
        """Count a refusal; `protocol_class` sets it."""

    @staticmethod
    def is_known(network: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Tell a known client from a stranger; `protocol_class` sets it."""
        raise NotImplementedError

    def _check_size(self) -> None:
        """Limit what the parser reports by no callback: headers without an end, and what surrounds chunks."""
        if self._phase is _ReadPhase.HEADERS and self._bytes > MAX_HEADER_BYTES:
            self._refuse_headers(f"over {MAX_HEADER_BYTES} bytes of headers")
        elif (
            self._phase is _ReadPhase.BODY and self._bytes > MAX_HEADER_BYTES + 2 * self.limits.max_body_bytes
        ):
            self._refuse_body(f"with what surrounds it, {self._bytes}")

    def _update_timer(self) -> None:
        """Set the timer for what the connection waits for now."""
        if self._phase is _ReadPhase.IDLE:
            self._stop_timer()
            if self._pending_replies == 0 and self.timeout_keep_alive_task is None:
                # Its reply went out before its body was here: uvicorn has dropped its keep-alive timer.
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
            return
        self._unset_keepalive_if_required()
        if self._timer_purpose != (self._requests, self._phase):
            self._stop_timer()
            is_body = self._phase is _ReadPhase.BODY
            seconds = self.limits.body_seconds if is_body else self.limits.header_seconds
            self._timer_purpose = (self._requests, self._phase)
            self._timer = self.loop.call_later(seconds, self._too_slow)

    def _stop_timer(self) -> None:
        self._timer_purpose = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        if self.flow.read_paused:  # the client waits for us, not we for it
            self._stop_timer()
            self._update_timer()
            return
        what = self._phase.value
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"{what}_too_slow", f"the {what} did not arrive in time")

    def _limit_unread_time(self) -> None:
        """Limit how long replies may lie unread: they hold memory, and a closed connection waits for them."""
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
        """Reply with an error once the requests before this one are answered, and hang up."""
        if self._is_ending:
            return
        self.on_refusal(status)
        if self._phase is not _ReadPhase.BODY or self._drop_cycle():
            body = json.dumps({"error": code, "message": message}).encode()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            self._refusal = STATUS_LINE[status] + head % len(body) + body
        self._end()

    def _drop_cycle(self) -> bool:
        """Take the current request, whose body is at fault, from the application. False if its reply has
        begun already."""
        cycle = self.cycle
        if cycle.response_started:
            return False
        if self.pipeline and self.pipeline[0][0] is cycle:  # the newest stands first
            self.pipeline.popleft()
        cycle.disconnected = True
        cycle.message_event.set()
        self._pending_replies -= 1
        return True

    def _end(self) -> None:
        """Read nothing more, and hang up once the pending replies are out."""
        self._is_ending = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        if self._pending_replies == 0:
            self.transport.write(self._refusal)
            self._close()
        elif not self._refusal:
            self.cycle.keep_alive = False  # so that the last reply says so

    def _close(self) -> None:
        self.transport.close()
        self._limit_unread_time()


def protocol_class(
    limits: HttpLimits, on_refusal: Callable[[int], None], is_known: IsKnown
) -> type[HttpToolsProtocol]:
    """The protocol class with an operator's limits; uvicorn makes the instances itself."""
    members = {
        "limits": limits,
        "strangers": Places(limits.max_stranger_connections, limits.max_connections_per_address),
        "known": Places(limits.max_known_connections, limits.max_connections_per_address),
        "on_refusal": staticmethod(on_refusal),
        "is_known": staticmethod(is_known),
    }
    return type("LimitedProtocol", (BoundedProtocol,), members)
