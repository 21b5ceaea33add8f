"""How many connections there may be, on a real socket with the real protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from miner.api.protocol import WireLimits, protocol

HERE, ELSEWHERE, THIRD = "127.0.0.1", "127.0.0.2", "127.0.0.3"
ASK = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
LIMITS = WireLimits(
    header_seconds=300,
    body_seconds=300,
    max_body_bytes=1000,
    max_connections=6,
    max_connections_per_address=3,
)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


waiting: list[str] = []


async def answering(scope: Scope, _receive: Receive, send: Send) -> None:
    if scope["path"] == "/wait":
        waiting.append(scope["path"])
        await asyncio.Event().wait()
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    made = protocol(LIMITS, lambda _status: None)
    config = uvicorn.Config(answering, http=made, ws="none", lifespan="off", log_config=None)
    config.load()
    waiting.clear()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: made(config=config, server_state=state, app_state={}), HERE, 0
    )
    yield server.sockets[0].getsockname()[1]
    server.close()
    for connection in list(state.connections):
        connection.transport.abort()
    await server.wait_closed()


async def connect(port: int, address: str) -> Streams:
    return await asyncio.open_connection(HERE, port, local_addr=(address, 0))


async def ask(streams: Streams, request: bytes = ASK) -> bytes:
    reader, writer = streams
    writer.write(request)
    reply = await reader.read()
    writer.close()
    return reply.split(b"\r\n", 1)[0]


async def test_one_address_can_not_take_all_connections(port: int) -> None:
    silent = [await connect(port, HERE) for _ in range(3)]
    assert b" 429 " in await ask(await connect(port, HERE), b"")
    assert b" 204 " in await ask(await connect(port, ELSEWHERE))
    for _, writer in silent:
        writer.close()


async def test_a_closed_connection_makes_room_for_its_address(port: int) -> None:
    for _ in range(10):
        assert b" 204 " in await ask(await connect(port, HERE))


async def test_connections_that_only_lie_there_shut_nobody_out(port: int) -> None:
    silent = [await connect(port, address) for address in (HERE, ELSEWHERE) for _ in range(3)]
    for _ in range(10):
        assert b" 204 " in await ask(await connect(port, THIRD))
    for _, writer in silent:
        writer.close()


async def test_a_connection_on_which_something_was_asked_is_not_hung_up_on(port: int) -> None:
    busy = [await connect(port, address) for address in (HERE, ELSEWHERE) for _ in range(3)]
    for _, writer in busy:
        writer.write(ASK.replace(b"/", b"/wait", 1))
        await writer.drain()
    async with asyncio.timeout(60):
        while len(waiting) < len(busy):
            await asyncio.sleep(0.01)
    assert b" 503 " in await ask(await connect(port, THIRD), b"")
    assert not any(reader.at_eof() for reader, _ in busy)
    for _, writer in busy:
        writer.close()
