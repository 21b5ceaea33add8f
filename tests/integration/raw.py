"""HTTP/1.1 in bytes: tells an answer that is whole from one that is torn and from none at all.

Clients made for everyday use hide the difference between the last two, and that difference is what these
tests are about: a request that nobody has read may be sent again, a torn reply has already done its harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

LOOPBACK = "127.0.0.1"
_HEAD_END = b"\r\n\r\n"
_STATUS_LINE = re.compile(rb"HTTP/1\.1 ([1-5]\d\d) [ -~]*")


class Torn(AssertionError):
    """Bytes came, and they are not a whole reply."""


class Cut(Torn):
    """A reply began, and the connection ended within it."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def keeps_alive(self) -> bool:
        return self.headers.get("connection", "").lower() != "close"


def take_answer(received: bytearray) -> Answer | None:
    """The first whole answer, removed from `received`; None while it is not all there."""
    head, found, rest = bytes(received).partition(_HEAD_END)
    if not found:
        return None
    status_line, *lines = head.split(b"\r\n")
    matched = _STATUS_LINE.fullmatch(status_line)
    if matched is None:
        raise Torn(f"not the beginning of a reply: {status_line[:100]!r}")
    headers = {}
    for line in lines:
        name, colon, value = line.decode("ascii").partition(":")
        if not colon or name.lower() in headers:
            raise Torn(f"not a header, or a second one: {line!r}")
        headers[name.lower()] = value.strip()
    length = headers.get("content-length", "")
    if not length.isdigit():
        raise Torn(f"content-length is {length!r} in {headers}")
    if len(rest) < int(length):
        return None
    body = rest[: int(length)]
    del received[: len(head) + len(_HEAD_END) + len(body)]
    if headers.get("content-type") != "application/json":
        raise Torn(f"content-type is {headers.get('content-type')!r}")
    try:
        json.loads(body)
    except ValueError:
        raise Torn(f"not JSON: {body[:200]!r}") from None
    return Answer(int(matched[1]), headers, body)


@dataclass
class Connection(asyncio.Protocol):
    """One connection. `async with await connect(port)`; `OSError` when nobody listens."""

    received: bytearray = field(default_factory=bytearray)
    ended: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        self._news.set()

    def connection_lost(self, _error: Exception | None) -> None:
        self.ended = True
        self._news.set()

    def send(self, data: bytes) -> None:
        self.transport.write(data)

    async def answer(self, limit_s: float = 240.0) -> Answer | None:
        """The next whole answer; None when the connection ended before its first byte; `Torn` otherwise."""
        async with asyncio.timeout(limit_s):
            while True:
                found = take_answer(self.received)
                if found is not None:
                    return found
                if self.ended:
                    break
                self._news.clear()
                await self._news.wait()
        if self.received:
            raise Cut(f"the connection ended within a reply: {bytes(self.received[:300])!r}")
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.transport.abort()
        while not self.ended:
            self._news.clear()
            await self._news.wait()


async def connect(port: int) -> Connection:
    _, made = await asyncio.get_running_loop().create_connection(Connection, LOOPBACK, port)
    return made


async def ask(port: int, request: bytes, limit_s: float = 240.0) -> Answer | None:
    """One request on a connection of its own; None when it was refused or ended before the first byte."""
    with contextlib.suppress(OSError):
        async with await connect(port) as connection:
            connection.send(request)
            return await connection.answer(limit_s)
    return None


def request(method: str, path: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"host: {LOOPBACK}", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if method == "POST":
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def listens(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def occupied(port: int) -> Iterator[None]:
    with socket.create_server((LOOPBACK, port)):
        yield
