"""A port whose places are all taken by connections that send nothing."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.doubles.http_bytes import request
from tests.miner.http import slow_clients
from tests.miner.http.daemon_process import DaemonProcess, run_daemon_process
from tests.miner.http.raw_connection import RawConnection

pytestmark = pytest.mark.process


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with run_daemon_process(tmp_path, {}) as running:
        yield running


@contextmanager
def slow_client(port: int, address: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-S", "-E", slow_clients.__file__, str(port), address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process  # leaving closes its standard input, which ends it


def test_validators_are_answered_while_twelve_addresses_hold_what_they_can(daemon: DaemonProcess) -> None:
    with daemon.connect() as raw:
        assert raw.send(daemon.get("/training_repo/text")).reply().error == "not_entered"
    known, new = "127.0.0.1", "127.0.0.77"
    with ExitStack() as stack:
        clients = [
            stack.enter_context(slow_client(daemon.port, f"127.0.1.{number}")) for number in range(1, 13)
        ]
        for client in clients:  # every one has been hung up on: all places are taken
            assert client.stdout is not None
            assert client.stdout.readline() == slow_clients.FULL
        for address in (known, new):
            seconds = []
            for _ in range(20):
                began = time.monotonic()
                with RawConnection(daemon.port, address=address) as raw:
                    assert raw.send(daemon.get("/training_repo/text")).reply().error == "not_entered"
                seconds.append(time.monotonic() - began)
            assert statistics.median(seconds) < 1.0


def test_the_operator_is_answered_while_others_hold_connections_without_the_token(
    daemon: DaemonProcess,
) -> None:
    """Every user of the machine can open them, and all come from the operator's own address."""
    port, signed = daemon.stack.operator_port, daemon.stack.operator_headers()
    with ExitStack() as stack:
        held = [stack.enter_context(RawConnection(port)).send(b"GET /status HTTP/1.1\r\nx: ")]
        with RawConnection(port) as own:
            assert own.send(request("/status", signed)).reply().status == 200
            held += [
                stack.enter_context(RawConnection(port)).send(b"GET /status HTTP/1.1\r\nx: ")
                for _ in range(300)
            ]
            for _ in range(5):
                with RawConnection(port) as raw:
                    assert raw.send(request("/status", signed)).reply().status == 200
            assert held[0].last_reply().error in ("busy", "headers_too_slow")
            assert own.send(request("/status", signed)).reply().status == 200
        last = held[-1].last_reply()
        assert (last.status, last.error) == (408, "headers_too_slow")
