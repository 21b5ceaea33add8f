"""A small HTTP server whose replies can be made to go wrong in every way that a network does.

Hubs and dataset servers are built on it. It listens on loopback, serves each connection in a thread, keeps
what it was asked, and puts into each reply whatever `Fault` was ordered for it.
"""

from __future__ import annotations

import re
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import parse_qs, urlsplit

_CHUNK = 64 * 1024


@dataclass
class Fault:
    """What shall go wrong, with which requests. Several wishes in one fault all happen."""

    #: Looked for in "METHOD /path?query".
    match: str = ""
    #: How often; None is for ever.
    times: int | None = 1
    #: How many matching requests get through first.
    skip: int = 0
    #: Answer with this instead of doing what was asked.
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    #: Seconds before the head.
    delay: float = 0.0
    #: After so many bytes of the body the connection is reset, closed in order, or goes silent.
    cut_after: int | None = None
    how: Literal["reset", "close", "hang"] = "reset"
    #: Bytes per second of the body.
    rate: float | None = None
    #: What Content-Length says, whatever is sent.
    declared_length: int | None = None
    #: No Content-Length at all: the body ends with the connection.
    no_length: bool = False
    #: The byte at this place of the whole file is another one.
    corrupt_at: int | None = None
    ignore_range: bool = False
    #: After so many bytes of the request's body the connection is reset, and nothing is done.
    cut_request_after: int | None = None
    #: Bytes per second at which the request's body is taken.
    request_rate: float | None = None
    #: The request is carried out, and the connection reset before a reply: was it done or not?
    no_reply: bool = False


@dataclass(frozen=True)
class Request:
    method: str
    #: Without the query, as sent (still quoted).
    path: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]
    body: bytes

    @property
    def line(self) -> str:
        return f"{self.method} {self.path}"


@dataclass
class Reply:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | Path = b""
    #: Whether a Range header may pick a part of the body.
    ranged: bool = False


class FlakyServer:
    """Subclass it and say in `answer` what is right; `faults` says what goes wrong."""

    def __init__(self, doors: int = 1) -> None:
        """`doors` is how many ports lead in: to a client another port is another site."""
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        #: Bytes of bodies that left for each "METHOD /path".
        self.sent: dict[str, int] = {}
        #: Bytes of bodies that came for each "METHOD /path", whether or not anything was made of them.
        self.taken: dict[str, int] = {}
        self.lock = threading.RLock()
        self.over = threading.Event()
        self._servers = [_Server(("127.0.0.1", 0), _handler_of(self)) for _ in range(doors)]
        self._threads = [
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
            for server in self._servers
        ]

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers]

    @property
    def url(self) -> str:
        return self.urls[0]

    def answer(self, request: Request) -> Reply:
        raise NotImplementedError

    def fail(self, match: str = "", **wishes: Any) -> Fault:
        """Order a fault for requests to come."""
        fault = Fault(match, **wishes)
        with self.lock:
            self.faults.append(fault)
        return fault

    def speak_tls(self, context: ssl.SSLContext) -> None:
        """From now on; `url` still says http."""
        for server in self._servers:
            server.tls = context

    def lines(self, match: str = "") -> list[str]:
        """The requests so far, as "METHOD /path"."""
        with self.lock:
            return [request.line for request in self.requests if re.search(match, request.line)]

    def bytes_sent(self, match: str = "") -> int:
        with self.lock:
            return sum(count for line, count in self.sent.items() if re.search(match, line))

    def bytes_taken(self, match: str = "") -> int:
        with self.lock:
            return sum(count for line, count in self.taken.items() if re.search(match, line))

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()

    def take_fault(self, text: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times == 0 or not re.search(fault.match, text):
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                if fault.times is not None:
                    fault.times -= 1
                return fault
        return None

    def count(self, request: Request, sent: int) -> None:
        with self.lock:
            self.sent[request.line] = self.sent.get(request.line, 0) + sent


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    tls: ssl.SSLContext | None = None

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the connection's own thread, so that a slow handshake holds up nobody."""
        if self.tls is None:
            super().finish_request(request, client_address)
            return
        with self.tls.wrap_socket(request, server_side=True) as covered:
            super().finish_request(covered, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news here; anything else is a bug in a double."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _handler_of(owner: FlakyServer) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        server_of_tests = owner

    return Handler


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of_tests: FlakyServer
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        pass

    def _serve(self) -> None:
        owner = self.server_of_tests
        fault = owner.take_fault(f"{self.command} {self.path}") or Fault()
        request = self._read(fault)
        with owner.lock:
            owner.requests.append(request)
        if fault.cut_request_after is not None and len(request.body) >= fault.cut_request_after:
            self._hang_up("reset")
            return
        if fault.delay:
            owner.over.wait(fault.delay)
        reply = owner.answer(request) if fault.status is None else Reply(fault.status, body=fault.body)
        if fault.no_reply:
            self._hang_up("reset")
        else:
            reply.headers.update(fault.headers)
            self._send(request, reply, fault)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = _serve

    def _read(self, fault: Fault) -> Request:
        parts = urlsplit(self.path)
        chunked = self.headers.get("Transfer-Encoding", "").lower() == "chunked"
        pieces = self._chunks() if chunked else self._plain(int(self.headers.get("Content-Length") or 0))
        body = self._taken(pieces, fault)
        headers = {name.lower(): value for name, value in self.headers.items()}
        query = parse_qs(parts.query, keep_blank_values=True)
        return Request(self.command, parts.path, query, headers, body)

    def _taken(self, pieces: Iterator[bytes], fault: Fault) -> bytes:
        body, began, owner = bytearray(), time.monotonic(), self.server_of_tests
        for piece in pieces:
            body += piece
            with owner.lock:
                line = f"{self.command} {urlsplit(self.path).path}"
                owner.taken[line] = owner.taken.get(line, 0) + len(piece)
            if fault.cut_request_after is not None and len(body) >= fault.cut_request_after:
                break
            if fault.request_rate is not None:
                owner.over.wait(max(began + len(body) / fault.request_rate - time.monotonic(), 0))
        return bytes(body)

    def _plain(self, length: int) -> Iterator[bytes]:
        while length > 0 and (piece := self.rfile.read(min(length, _CHUNK))):
            length -= len(piece)
            yield piece

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _send(self, request: Request, reply: Reply, fault: Fault) -> None:
        size = reply.body.stat().st_size if isinstance(reply.body, Path) else len(reply.body)
        first, last, status = 0, size, reply.status
        wanted = request.headers.get("range", "")
        if reply.ranged:
            reply.headers.setdefault("Accept-Ranges", "bytes")
        if reply.ranged and wanted and not fault.ignore_range and self._same_file(request, reply):
            first, last = _range(wanted, size)
            status = 206 if first < size else 416
            given = f"bytes {first}-{last - 1}/{size}" if first < size else f"bytes */{size}"
            reply.headers["Content-Range"] = given
            last = last if first < size else first
        self.send_response(status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if fault.no_length:
            self.close_connection = True
            self.send_header("Connection", "close")
        elif "Content-Length" not in reply.headers:
            length = last - first if fault.declared_length is None else fault.declared_length
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self._send_body(request, reply.body, first, last, fault)
        if fault.declared_length is not None:
            self.close_connection = True

    @staticmethod
    def _same_file(request: Request, reply: Reply) -> bool:
        condition = request.headers.get("if-range")
        return condition is None or condition == reply.headers.get("ETag")

    def _send_body(self, request: Request, body: bytes | Path, first: int, last: int, fault: Fault) -> None:
        owner, sent, began = self.server_of_tests, 0, time.monotonic()
        for offset, piece in _pieces(body, first, last, fault):
            if fault.cut_after is not None and sent + len(piece) > fault.cut_after:
                piece = piece[: fault.cut_after - sent]
            if fault.corrupt_at is not None and 0 <= (at := fault.corrupt_at - offset) < len(piece):
                piece = piece[:at] + bytes([piece[at] ^ 0xFF]) + piece[at + 1 :]
            self.wfile.write(piece)
            owner.count(request, len(piece))
            sent += len(piece)
            if fault.cut_after is not None and sent >= fault.cut_after:
                self._hang_up(fault.how)
                return
            if fault.rate is not None and owner.over.wait(
                max(began + sent / fault.rate - time.monotonic(), 0)
            ):
                self._hang_up("reset")
                return

    def _hang_up(self, how: str) -> None:
        self.close_connection = True
        if how == "hang":
            self._wait_for_the_end()
        if how != "close":
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()
        # Its own end of the files is closed with the socket; they must not flush into nothing.
        self.wfile.close = lambda: None  # type: ignore[method-assign]

    def _wait_for_the_end(self) -> None:
        """Silence, until the client gives up or the server is stopped."""
        self.connection.settimeout(0.02)
        while not self.server_of_tests.over.is_set():
            try:
                if not self.connection.recv(1024):
                    return
            except TimeoutError:
                continue
            except OSError:
                return


def _pieces(body: bytes | Path, first: int, last: int, fault: Fault) -> Iterator[tuple[int, bytes]]:
    step = _CHUNK if fault.rate is None else max(min(int(fault.rate / 50), _CHUNK), 1)
    if isinstance(body, bytes):
        for at in range(first, last, step):
            yield at, body[at : min(at + step, last)]
        return
    with body.open("rb") as file:
        file.seek(first)
        for at in range(first, last, step):
            yield at, file.read(min(step, last - at))


def _range(header: str, size: int) -> tuple[int, int]:
    """One range, as (first, one past the last)."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", header.strip())
    if not found or not (found[1] or found[2]):
        return 0, size
    if not found[1]:
        return max(size - int(found[2]), 0), size
    return int(found[1]), min(int(found[2]) + 1, size) if found[2] else size
