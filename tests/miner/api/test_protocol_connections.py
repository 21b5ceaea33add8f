"""How many connections there may be, on a real socket with the real protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from miner.api.protocol import WireLimits, protocol

HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"
ASK = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
LIMITS = WireLimits(
    header_seconds=5, body_seconds=5, max_body_bytes=1000, max_connections=6, max_connections_per_address=3
)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def answering(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    made = protocol(LIMITS, lambda _status: None)
    config = uvicorn.Config(answering, http=made, ws="none", lifespan="off", log_config=None)
    config.load()
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
