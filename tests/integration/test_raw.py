"""The other tests of this folder rest on this: a torn reply does not pass for a whole one."""

import asyncio
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from miner.dev.stack import prepare_stack
from tests.doubles.each import each
from tests.doubles.http_bytes import Reply, Torn, request
from tests.integration import raw
from tests.integration.traffic import Stream, Validator

WHOLE = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 7\r\n\r\n{"a":1}'
Manner = Callable[[asyncio.StreamWriter], None]


async def asked(manner: Manner) -> Reply | None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        manner(writer)

    server = await asyncio.start_server(serve, raw.LOOPBACK, 0)
    async with server:
        return await raw.ask(server.sockets[0].getsockname()[1], request("/"))


def sends(data: bytes) -> Manner:
    def manner(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        writer.close()

    return manner


def resets(writer: asyncio.StreamWriter) -> None:
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(raw.socket.SOL_SOCKET, raw.socket.SO_LINGER, linger)
    writer.transport.abort()


async def test_a_whole_reply_is_an_answer_and_an_end_before_its_first_byte_is_none() -> None:
    answer = await asked(sends(WHOLE))
    assert answer is not None
    assert (answer.status, answer.json) == (200, {"a": 1})
    assert await asked(sends(b"")) is None
    assert await asked(resets) is None
    with raw.socket.create_server((raw.LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
    assert await raw.ask(port, b"GET / HTTP/1.1\r\n\r\n") is None


@each(
    "data",
    [
        WHOLE[:1],
        WHOLE[:-1],
        WHOLE[: WHOLE.index(b"\r\n\r\n")],
        WHOLE.replace(b"200", b"2x0"),
        WHOLE.replace(b"content-length: 7", b"content-length: 8"),
        WHOLE.replace(b"content-length: 7", b"content-length: 6"),
        WHOLE.replace(b"content-length: 7\r\n", b""),
        WHOLE.replace(b"application/json", b"text/plain"),
        WHOLE.replace(b"\r\n\r\n", b"\r\ncontent-length: 7\r\n\r\n"),
    ],
)
async def test_anything_less_than_a_whole_reply_is_torn(data: bytes) -> None:
    with pytest.raises(Torn):
        await asked(sends(data))


@pytest.mark.parametrize("killed", [False, True])
async def test_a_reply_that_is_cut_is_an_error_unless_the_daemon_was_killed(
    killed: bool, tmp_path: Path
) -> None:
    stack = prepare_stack(tmp_path)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        stream.stopping = True
        stream.killed = killed
        sends(WHOLE[:-1])(writer)

    server = await asyncio.start_server(serve, raw.LOOPBACK, 0)
    stream = Stream(Validator(replace(stack, public_port=server.sockets[0].getsockname()[1])))
    async with server:
        if killed:
            await stream.run(1)
            assert (stream.answered, stream.unanswered) == (0, 1)
        else:
            with pytest.raises(ExceptionGroup) as caught:
                await stream.run(1)
            assert caught.group_contains(Torn)
