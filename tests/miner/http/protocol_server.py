"""A server on a thread of its own, whose application answers when a test lets it.

The real protocol on the real event loop; only what lies behind it is replaced, so that "while the first
request is being answered" is a moment that a test can hold for as long as it needs.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from miner.http.limits import HttpLimits, protocol_class
from tests.miner.http.raw_connection import PATIENCE

#: A busy machine fails no test by being slow. Where time is what is tested, `be_hasty` limits it.
PATIENT = HttpLimits(
    header_seconds=300,
    body_seconds=300,
    max_body_bytes=10_000,
    max_known_connections=25,
    max_stranger_connections=25,
)
HASTY = replace(PATIENT, header_seconds=2.5, body_seconds=2.5)
HASTY_KEEP_ALIVE = 2.5
KNOWN = (b"authorization", b"known")


class ProtocolServer:
    """`/now…` is answered at once, `/body…` when its body is there, `/wait…` when `let_go` names it;
    `/big/1000` is a reply of a thousand bytes. Known are those who send `KNOWN`, and networks in `known`.
    """

    def __init__(self) -> None:
        self.port = 0
        self.started: list[str] = []
        self.disconnected: list[str] = []
        self.refused: list[int] = []
        self.known: set[str] = set()
        self.changed = threading.Condition()
        self.ready = threading.Event()
        self.loop: asyncio.AbstractEventLoop
        self.uvicorn: uvicorn.Server
        self.config: uvicorn.Config
        self.protocol: type[asyncio.Protocol]
        self._gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        self._record(self.started, path)
        if path.startswith("/body"):
            while (message := await receive()).get("more_body"):
                pass
            if message["type"] == "http.disconnect":
                self._record(self.disconnected, path)
                return
        if path.startswith("/wait"):
            await self._gates[path].wait()
        body = b'{"path":"%s"}' % path.encode()
        if path.startswith("/big/"):
            body = b"x" * int(path.removeprefix("/big/"))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _record(self, where: list[Any], what: Any) -> None:
        with self.changed:
            where.append(what)
            self.changed.notify_all()

    def wait_until(self, what: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(what, PATIENCE), (self.started, self.disconnected, self.refused)

    def release(self, *paths: str) -> None:
        for path in paths:
            self.loop.call_soon_threadsafe(self._gates[path].set)

    @property
    def connections(self) -> int:
        return len(self.uvicorn.server_state.connections)

    async def _serve(self, listening: socket.socket, limits: HttpLimits, keep_alive: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.protocol = protocol_class(
            limits,
            lambda status: self._record(self.refused, status),
            lambda network, headers: network in self.known or KNOWN in headers,
        )
        self.config = uvicorn.Config(
            self,
            http=self.protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=keep_alive,  # type: ignore[arg-type]
            timeout_graceful_shutdown=10,
        )
        self.uvicorn = _Server(self.config)
        self.ready.set()
        await self.uvicorn.serve([listening])


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def be_hasty(server: ProtocolServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the time of connections, and of the phases of requests, that begin from now on."""
    monkeypatch.setattr(server.protocol, "limits", HASTY)
    monkeypatch.setattr(server.config, "timeout_keep_alive", HASTY_KEEP_ALIVE)


@contextmanager
def run_protocol_server(
    limits: HttpLimits = PATIENT, *, keep_alive: float = 300, send_buffer: int | None = None
) -> Iterator[ProtocolServer]:
    server = ProtocolServer()
    listening = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server.port = listening.getsockname()[1]

    def serve() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server._serve(listening, limits, keep_alive))

    thread = threading.Thread(target=serve)
    thread.start()
    server.ready.wait()
    try:
        yield server
    finally:
        server.release(*server._gates)
        server.uvicorn.should_exit = True
        thread.join()
