"""Connections that tell an answer that is whole from one that is torn and from none at all.

Clients made for everyday use hide the difference between the last two, and that difference is what these
tests are about: a request that nobody has read may be sent again, a torn reply has already done its harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from tests.doubles.http_bytes import Reply, Torn, take_reply

LOOPBACK = "127.0.0.1"


class Cut(Torn):
    """A reply began, and the connection ended within it."""


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

    async def answer(self, limit_s: float = 240.0) -> Reply | None:
        """The next whole answer; None when the connection ended before its first byte; `Torn` otherwise."""
        async with asyncio.timeout(limit_s):
            while True:
                found = take_reply(self.received)
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
    _, connection = await asyncio.get_running_loop().create_connection(Connection, LOOPBACK, port)
    return connection


async def ask(port: int, request: bytes, limit_s: float = 240.0) -> Reply | None:
    """One request on a connection of its own; None when it was refused or ended before the first byte."""
    with contextlib.suppress(OSError):
        async with await connect(port) as connection:
            connection.send(request)
            return await connection.answer(limit_s)
    return None


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
