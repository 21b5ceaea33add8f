"""The daemon as a process: how it starts, why it does not, and how it stops."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from miner.dev.stack import LOOPBACK, ChildProcess, Stack, daemon, free_ports, prepare
from miner.server import RUN_FILE, ExitCode
from miner.store.database import FILE_NAME, LOCK_NAME
from tests.integration import raw
from tests.integration.conftest import Ended
from tests.integration.traffic import Sent, Validator, assert_kept, assert_whole, books, say_all

pytestmark = pytest.mark.integration

Running = Callable[..., ChildProcess]
Ending = Callable[..., Ended]


# Starting


def test_it_answers_within_two_seconds_of_its_start(running: Running) -> None:
    # The best of three: the bar is about the daemon, not about what else this machine is doing.
    taken = []
    for _ in range(3):
        child = running()
        taken.append(child.start_s)
        assert child.stop() == ExitCode.OK
        if taken[-1] < 2:
            return
    pytest.fail(f"the first answer came after {', '.join(f'{seconds:.1f} s' for seconds in taken)}")


def test_the_run_file_tells_ports_that_answer_and_goes_with_the_daemon(
    stack: Stack, running: Running
) -> None:
    child = running()
    told = json.loads((stack.data_dir / RUN_FILE).read_text())
    assert told == {
        "pid": child.pid,
        "public_port": stack.public_port,
        "operator_port": stack.operator_port,
    }
    assert child.stop() == ExitCode.OK
    assert not (stack.data_dir / RUN_FILE).exists()


def test_what_it_says_it_listens_on_it_listens_on(stack: Stack) -> None:
    child = daemon(replace(stack, public_port=0, operator_port=0))
    run_file = stack.data_dir / RUN_FILE
    process = subprocess.Popen(
        child.command, cwd=child.folder, env=child.environment, stderr=subprocess.DEVNULL
    )
    try:
        while not run_file.exists():
            assert process.poll() is None
        told = json.loads(run_file.read_text())
        assert raw.listens(told["public_port"])
        assert raw.listens(told["operator_port"])
    finally:
        process.terminate()
        assert process.wait(20) == ExitCode.OK


@pytest.mark.parametrize("setting", ["PUBLIC_PORT", "OPERATOR_PORT"])
def test_a_port_in_use_is_named_with_its_setting(setting: str, stack: Stack, ended: Ending) -> None:
    port = int(stack.settings()[setting])
    with raw.occupied(port):
        done = ended()
    assert done.returncode == ExitCode.PORT_IN_USE
    assert f"127.0.0.1:{port} can't be listened on (Address already in use)" in done.stderr
    assert f"set {setting}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("setting", ["PUBLIC_HOST", "OPERATOR_HOST"])
@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_named_with_its_setting(
    host: str, setting: str, ended: Ending
) -> None:
    done = ended(**{setting: host, "OPERATOR_TOKEN": "a-token-of-sixteen-letters"})
    assert done.returncode == ExitCode.PORT_IN_USE
    assert f"{host}:" in done.stderr
    assert setting in done.stderr
    assert "Traceback" not in done.stderr


def test_a_second_daemon_on_the_same_folder_is_refused_and_the_first_goes_on(
    stack: Stack, running: Running, ended: Ending
) -> None:
    first = running()
    public, operator = free_ports(2)
    done = ended(replace(stack, public_port=public, operator_port=operator))
    assert done.returncode == ExitCode.LOCKED
    assert f"{stack.data_dir} is in use by another god-miner (pid {first.pid})" in done.stderr
    assert "DATA_DIR" in done.stderr
    assert first.stop() == ExitCode.OK
    assert running().stop() == ExitCode.OK


def test_two_daemons_for_one_port_started_together_end_as_one(
    tmp_path: Path, stack: Stack, running: Running
) -> None:
    """Also while neither answers yet."""
    other = replace(prepare(tmp_path / "other"), public_port=stack.public_port)
    children = [daemon(stack), daemon(other)]
    processes = [
        subprocess.Popen(
            child.command,
            cwd=child.folder,
            env=child.environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for child in children
    ]
    try:
        while (codes := [process.poll() for process in processes]) == [None, None]:
            time.sleep(0.01)
        loser = next(process for process in processes if process.returncode is not None)
        assert sorted(codes, key=str) == sorted([ExitCode.PORT_IN_USE, None], key=str)
        _, told = loser.communicate(timeout=20)
        assert "PUBLIC_PORT" in told
        assert "Traceback" not in told
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_wrong_settings_are_told_all_at_once(ended: Ending) -> None:
    done = ended(
        NETUID="fifty-six",
        PUBLIC_PORT="99999",
        MAX_HOURS="-1",
        TRAINING_REPO_TEXT_URL="https://github.com/owner/name",
        TRAINING_REPO_TEXT_COMMIT="main",
        OPERATOR_HOST="0.0.0.0",
    )
    assert done.returncode == ExitCode.CONFIG
    assert done.stdout == ""
    for variable, value in (
        ("NETUID", "'fifty-six'"),
        ("PUBLIC_PORT", "'99999'"),
        ("MAX_HOURS", "'-1'"),
        ("TRAINING_REPO_TEXT_COMMIT", "'main'"),
        ("OPERATOR_TOKEN", "must be set"),
    ):
        assert any(variable in line and value in line for line in done.stderr.splitlines()), variable
    assert "5 problems" in done.stderr


def test_a_missing_wallet_is_told_with_the_way_out(stack: Stack, ended: Ending) -> None:
    done = ended(WALLET_NAME="mistyped")
    assert done.returncode == ExitCode.CONFIG
    assert f"there is no hotkey at {stack.keys.wallet_path / 'mistyped/hotkeys/default'}" in done.stderr
    assert "WALLET_NAME" in done.stderr
    assert "Traceback" not in done.stderr


def test_books_of_a_newer_version_are_refused_and_left_as_they_are(
    stack: Stack, running: Running, ended: Ending
) -> None:
    running().stop()
    path = stack.data_dir / FILE_NAME
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    before = path.read_bytes()
    done = ended()
    assert done.returncode == ExitCode.CONFIG
    assert "'9999'" in done.stderr
    assert "run the newer god-miner" in done.stderr
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"not a database at all\n" * 500, b"SQLite format 3\0" + b"\1" * 5000])
def test_a_damaged_file_is_refused_and_left_as_it_is(content: bytes, stack: Stack, ended: Ending) -> None:
    stack.data_dir.mkdir()
    path = stack.data_dir / FILE_NAME
    path.write_bytes(content)
    done = ended()
    assert done.returncode == ExitCode.CONFIG
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr
    assert path.read_bytes() == content


# Stopping


async def begun(port: int, one: Sent) -> raw.Connection:
    """A request of which all but the last byte has been sent; the daemon has read that much of it."""
    connection = await raw.connect(port)
    connection.send(one.request[:-1])
    return connection


async def gone(port: int, limit_s: float = 10.0) -> None:
    """Returns when nobody listens there any more."""
    async with asyncio.timeout(limit_s):
        while raw.listens(port):  # noqa: ASYNC110 - the event is in another process
            await asyncio.sleep(0.01)


async def exit_code(child: ChildProcess, limit_s: float = 20.0) -> int:
    assert child.process is not None
    return await asyncio.to_thread(child.process.wait, limit_s)


def operator_answers(port: int) -> bool:
    with closing(http.client.HTTPConnection(LOOPBACK, port, timeout=5)) as connection:
        connection.request("GET", "/status")
        return connection.getresponse().status == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_requests_in_flight_be_answered_whole(
    number: signal.Signals, validator: Validator, running: Running
) -> None:
    child = running(MAX_JOBS="100")
    port = validator.stack.public_port
    offers = [validator.offer(validator.task()) for _ in range(20)]
    connections = [await begun(port, one) for one in offers]
    assert await raw.ask(port, raw.request("GET", "/healthz", {})) is not None  # all before it was read

    os.kill(child.pid, number)
    await gone(port)
    assert await asyncio.to_thread(operator_answers, validator.stack.operator_port)
    for connection, one in zip(connections, offers, strict=True):
        connection.send(one.request[-1:])
    for connection, one in zip(connections, offers, strict=True):
        one.answer = await connection.answer()
        assert one.answer is not None
        assert (one.answer.status, one.answer.json["accepted"]) == (200, True)
        assert not one.answer.keeps_alive
        connection.transport.abort()

    assert await exit_code(child) == ExitCode.OK
    with books(validator.stack) as connection:
        assert_whole(connection)
        assert_kept(connection, offers)
    assert not (validator.stack.data_dir / RUN_FILE).exists()


async def test_idle_connections_do_not_hold_up_the_stop(validator: Validator, running: Running) -> None:
    child = running()
    idle = [await raw.connect(validator.stack.public_port) for _ in range(5)]
    spoken = await raw.connect(validator.stack.public_port)
    spoken.send(raw.request("GET", "/healthz", {}))
    assert await spoken.answer() is not None
    began = time.perf_counter()
    os.kill(child.pid, signal.SIGTERM)
    assert await exit_code(child) == ExitCode.OK
    assert time.perf_counter() - began < 5
    for connection in [*idle, spoken]:
        assert await connection.answer() is None


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once_with_a_code_of_its_own(
    second: signal.Signals, validator: Validator, running: Running
) -> None:
    child = running(SHUTDOWN_GRACE_SECONDS="60", BODY_TIMEOUT_SECONDS="60")
    kept = validator.offer(validator.task())
    kept.answer = (await say_all(validator.stack.public_port, [kept.request]))[0]
    hanging = await begun(validator.stack.public_port, validator.offer(validator.task()))
    assert await raw.ask(validator.stack.public_port, raw.request("GET", "/healthz", {})) is not None
    os.kill(child.pid, signal.SIGTERM)
    await gone(validator.stack.public_port)
    os.kill(child.pid, second)
    assert await exit_code(child, 2) == ExitCode.FORCED
    assert await hanging.answer() is None
    assert "second signal" in child.log_tail()

    with books(validator.stack) as connection:
        assert_whole(connection)
        assert_kept(connection, [kept])
    again = running()
    assert again.stop() == ExitCode.OK


@pytest.mark.parametrize("padding", [0, 20_000])
async def test_what_does_not_end_within_the_grace_gets_no_promise(
    padding: int, validator: Validator, running: Running
) -> None:
    child = running(SHUTDOWN_GRACE_SECONDS="1", BODY_TIMEOUT_SECONDS="60")
    one = validator.offer(validator.task(), padding=padding)
    hanging = await begun(validator.stack.public_port, one)
    assert await raw.ask(validator.stack.public_port, raw.request("GET", "/healthz", {})) is not None
    os.kill(child.pid, signal.SIGTERM)
    answer = await hanging.answer()
    # A request that had not arrived is hung up on; one that was being worked on is told.
    assert answer is None or (answer.status, answer.json["error"]) == (503, "stopping")
    assert (answer is None) == (padding == 0)
    assert await exit_code(child) == ExitCode.OK
    assert "Traceback" not in child.log_file.read_text()
    with books(validator.stack) as connection:
        assert_kept(connection, [one])


async def test_a_grace_of_less_than_a_second_is_a_grace(validator: Validator, running: Running) -> None:
    child = running(SHUTDOWN_GRACE_SECONDS="0.9")
    one = validator.offer(validator.task())
    connection = await begun(validator.stack.public_port, one)
    assert await raw.ask(validator.stack.public_port, raw.request("GET", "/healthz", {})) is not None
    os.kill(child.pid, signal.SIGTERM)
    await gone(validator.stack.public_port)
    await asyncio.sleep(0.2)  # past uvicorn's own pause, after which nothing would be waited for
    connection.send(one.request[-1:])
    answer = await connection.answer()
    assert answer is not None
    assert answer.status == 200
    assert await exit_code(child) == ExitCode.OK


def lock_taken(stack: Stack) -> bool:
    return (stack.data_dir / LOCK_NAME).exists()


def books_under_way(stack: Stack) -> bool:
    return (stack.data_dir / f"{FILE_NAME}.migrating").exists()


def books_made(stack: Stack) -> bool:
    return (stack.data_dir / FILE_NAME).exists()


def run_file_written(stack: Stack) -> bool:
    return (stack.data_dir / RUN_FILE).exists()


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        (None, signal.SIGTERM),
        (None, signal.SIGINT),
        (lock_taken, signal.SIGTERM),
        (books_under_way, signal.SIGINT),
        (books_made, signal.SIGTERM),
        (run_file_written, signal.SIGINT),
    ],
)
def test_a_signal_during_the_start_ends_it_and_the_next_start_works(
    moment: Callable[[Stack], bool] | None, number: signal.Signals, stack: Stack, running: Running
) -> None:
    child = daemon(stack)
    with subprocess.Popen(
        child.command,
        cwd=child.folder,
        env=child.environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        began = time.perf_counter()
        if moment is None:
            time.sleep(0.15)  # somewhere in the imports
        while moment is not None and not moment(stack):
            assert process.poll() is None
            assert time.perf_counter() - began < 20
        process.send_signal(number)
        _, told = process.communicate(timeout=20)
    # Before it can listen to signals it dies of them; from then on it ends in good order.
    assert process.returncode in (ExitCode.OK, -number, 128 + number)
    if moment is not None:
        assert "Traceback" not in told
    assert not run_file_written(stack)
    assert not raw.listens(stack.public_port)
    assert running().stop() == ExitCode.OK
    with books(stack) as connection:
        assert_whole(connection)
