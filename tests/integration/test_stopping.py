"""The daemon as a process: how it stops."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
import uvloop

from miner.daemon_client import RUN_FILE
from miner.dev.stack import LOOPBACK, ChildProcess, DevStack
from miner.http.limits import HttpLimits
from miner.observe.metrics import Metrics
from miner.server import DaemonExitCode, _uvicorn_server
from miner.settings import load_settings
from tests.doubles.http_bytes import request
from tests.integration import raw
from tests.integration.traffic import Sent, Validator, assert_kept, assert_whole, say_all, store

PATIENT = {"miner.server.HEADER_SECONDS": "240", "miner.server.BODY_SECONDS": "240"}
Running = Callable[..., ChildProcess]


async def begun(port: int, one: Sent) -> raw.Connection:
    """A request of which all but the last byte has been sent; the daemon has read that much of it."""
    connection = await raw.connect(port)
    connection.send(one.request[:-1])
    return connection


async def gone(port: int, limit_s: float = 60.0) -> None:
    """Returns when nobody listens there any more."""
    async with asyncio.timeout(limit_s):
        while raw.listens(port):
            await asyncio.sleep(0.01)


async def exit_code(child: ChildProcess, limit_s: float = 120.0) -> int:
    assert child.process is not None
    return await asyncio.to_thread(child.process.wait, limit_s)


def operator_answers(stack: DevStack) -> bool:
    with closing(http.client.HTTPConnection(LOOPBACK, stack.operator_port, timeout=120)) as connection:
        connection.request("GET", "/status", headers=stack.operator_headers())
        return connection.getresponse().status == 200


@pytest.mark.kept("15")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_requests_in_flight_be_answered_whole(
    number: signal.Signals, validator: Validator, running: Running
) -> None:
    child = running(MAX_JOBS="100", SHUTDOWN_GRACE_SECONDS="240", **PATIENT)
    port = validator.stack.public_port
    offers = [validator.offer(validator.task()) for _ in range(20)]
    connections = [await begun(port, one) for one in offers]
    assert await raw.ask(port, request("/healthz")) is not None  # all before it was read

    os.kill(child.pid, number)
    await gone(port)
    assert await asyncio.to_thread(operator_answers, validator.stack)
    for connection, one in zip(connections, offers, strict=True):
        connection.send(one.request[-1:])
    for connection, one in zip(connections, offers, strict=True):
        one.answer = await connection.answer()
        assert one.answer is not None
        assert (one.answer.status, one.answer.json["accepted"]) == (200, True)
        assert one.answer.closes
        connection.transport.abort()

    assert await exit_code(child) == DaemonExitCode.OK
    with store(validator.stack) as connection:
        assert_whole(connection)
        assert_kept(connection, offers)
    assert not (validator.stack.data_dir / RUN_FILE).exists()


async def test_idle_connections_do_not_hold_up_the_stop(validator: Validator, running: Running) -> None:
    child = running(SHUTDOWN_GRACE_SECONDS="240", **PATIENT)
    idle = [await raw.connect(validator.stack.public_port) for _ in range(5)]
    spoken = await raw.connect(validator.stack.public_port)
    spoken.send(request("/healthz"))
    assert await spoken.answer() is not None
    os.kill(child.pid, signal.SIGTERM)
    assert await exit_code(child) == DaemonExitCode.OK  # long before the grace is over
    for connection in [*idle, spoken]:
        assert await connection.answer() is None


@pytest.mark.kept("15")
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once_with_a_code_of_its_own(
    second: signal.Signals, validator: Validator, running: Running
) -> None:
    child = running(SHUTDOWN_GRACE_SECONDS="240", **PATIENT)
    kept = validator.offer(validator.task())
    kept.answer = (await say_all(validator.stack.public_port, [kept.request]))[0]
    hanging = await begun(validator.stack.public_port, validator.offer(validator.task()))
    assert await raw.ask(validator.stack.public_port, request("/healthz")) is not None
    os.kill(child.pid, signal.SIGTERM)
    await gone(validator.stack.public_port)
    os.kill(child.pid, second)
    assert await exit_code(child) == DaemonExitCode.FORCED
    assert await hanging.answer() is None
    assert "second signal" in child.log_tail()

    with store(validator.stack) as connection:
        assert_whole(connection)
        assert_kept(connection, [kept])


@pytest.mark.kept("0")
@pytest.mark.parametrize("padding", [0, 20_000])
async def test_what_does_not_end_within_the_grace_is_not_accepted(
    padding: int, validator: Validator, running: Running
) -> None:
    child = running(SHUTDOWN_GRACE_SECONDS="1", **PATIENT)
    one = validator.offer(validator.task(), padding=padding)
    hanging = await begun(validator.stack.public_port, one)
    assert await raw.ask(validator.stack.public_port, request("/healthz")) is not None
    os.kill(child.pid, signal.SIGTERM)
    answer = await hanging.answer()
    assert answer is None or (answer.status, answer.json["error"]) == (503, "stopping")
    assert await exit_code(child) == DaemonExitCode.OK
    assert "Traceback" not in child.log_file.read_text()
    with store(validator.stack) as connection:
        assert_kept(connection, [one])


def server_of(stack: DevStack, app: Callable[..., Any], **settings: str) -> uvicorn.Server:
    """A server of the public port's limits for this app."""
    loaded = load_settings(env={**stack.settings(), **settings}, env_file=None)
    daemon: Any = SimpleNamespace(settings=loaded, metrics=Metrics())
    limits = HttpLimits(5, 10, 1000, max_known_connections=1, max_stranger_connections=100)
    return _uvicorn_server(app, daemon, limits, lambda _network, _headers: False)


def test_a_grace_of_less_than_a_second_is_not_rounded_to_none(stack: DevStack) -> None:
    server = server_of(stack, lambda *_: None, SHUTDOWN_GRACE_SECONDS="0.9")
    assert server.config.timeout_graceful_shutdown == 1


def test_connections_that_nobody_has_accepted_yet_are_answered_and_not_reset(stack: DevStack) -> None:
    """A busy daemon can have this many connections waiting."""
    clients: list[socket.socket] = []

    async def app(_scope: object, _receive: object, send: Callable[..., Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"answered"})

    server = server_of(stack, app)
    listening = socket.create_server((LOOPBACK, 0), backlog=100)
    address = listening.getsockname()

    async def last_tick(_counter: int) -> bool:
        # The event loop accepts nothing while this runs, and the server stops right after it.
        for _ in range(50):
            clients.append(socket.create_connection(address))
            clients[-1].sendall(request("/healthz"))
        return True

    server.on_tick = last_tick  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve(sockets=[listening]))
    for client in clients:
        with client, client.makefile("rb") as answer:
            assert b"answered" in answer.read()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
