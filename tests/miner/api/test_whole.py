"""What leaves the socket for one reply, piece by piece."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.server import ServerState

from miner.api import express
from miner.api.protocol import WireLimits

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
LIMITS = WireLimits(header_seconds=5, body_seconds=5, max_body_bytes=HIGH_WATER_LIMIT, max_connections=9)
HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]}
GET = b"GET / HTTP/1.1\r\n\r\n"
ON_WIRE = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n"


class Socket(asyncio.Transport):
    """Keeps what is written to it, each write by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.pieces.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def written(messages: Iterable[dict[str, Any]], *request: bytes) -> Socket:
    """All that a connection sends when the application answers with these messages."""

    async def app(_scope: Any, receive: Receive, send: Send) -> None:
        await receive()
        for message in messages:
            await send(message)

    config = uvicorn.Config(app, lifespan="off", log_config=None, server_header=False, date_header=False)
    config.load()
    state = ServerState()
    made = express.protocol(LIMITS, lambda _status: None, {})(config=config, server_state=state, app_state={})
    socket = Socket()
    made.connection_made(socket)
    for part in request or (GET,):
        made.data_received(part)
        await asyncio.sleep(0)
    await asyncio.gather(*state.tasks)
    made.connection_lost(None)
    return socket


def body(content: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def test_head_and_body_leave_in_one_piece() -> None:
    assert (await written([HEAD, body(b"true")])).pieces == [ON_WIRE + b"true"]


async def test_a_body_in_parts_leaves_whole() -> None:
    sent = await written([HEAD, body(b"t", True), body(b"ru", True), body(b"e")])
    assert sent.pieces == [ON_WIRE + b"t", b"ru", b"e"]


async def test_a_reply_without_a_body_leaves_too() -> None:
    empty = {**HEAD, "headers": [(b"content-length", b"0")]}
    assert (await written([empty, body(b"")])).pieces == [ON_WIRE.replace(b"4", b"0")]


async def test_a_reply_to_head_leaves_at_once() -> None:
    sent = await written([HEAD, body(b"")], b"HEAD / HTTP/1.1\r\n\r\n")
    assert sent.pieces == [ON_WIRE]


async def test_a_client_that_waits_for_continue_is_told_at_once() -> None:
    head = b"POST / HTTP/1.1\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n"
    sent = await written([HEAD, body(b"true")], head, b"{}")
    assert sent.pieces == [b"HTTP/1.1 100 Continue\r\n\r\n", ON_WIRE + b"true"]


async def test_a_reply_that_breaks_off_before_its_body_never_begins() -> None:
    sent = await written([HEAD])
    assert sent.pieces == []
    assert sent.closed
