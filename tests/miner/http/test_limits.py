"""What strangers do to a port: bytes of every kind against the real daemon, which answers, and lives."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import pytest

from tests.doubles.each import each
from tests.doubles.http_bytes import Reply, chunk, request
from tests.miner.http import slow_clients
from tests.miner.http.daemon_process import HASTY, PATIENT, DaemonProcess, run_daemon_process
from tests.miner.http.raw_connection import PATIENCE, RawConnection

pytestmark = pytest.mark.process

HUNDRED_MB = 100 * 1024**2


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, DaemonProcess]]:
    """One that is patient, so that a busy machine fails no test, and one that is not, for the time limits."""
    with (
        run_daemon_process(tmp_path_factory.mktemp("patient"), PATIENT) as patient,
        run_daemon_process(tmp_path_factory.mktemp("hasty"), HASTY) as hasty,
    ):
        yield {"patient": patient, "hasty": hasty}
    # All of this was other people's doing, none of it is worth a line that wakes somebody.
    for process in (patient, hasty):
        assert process.logged("WARNING", "ERROR", "CRITICAL") == []


def unharmed(process: DaemonProcess) -> Iterator[DaemonProcess]:
    """Refused is refused: nothing is stored, and the daemon lives."""
    before = process.counts()
    yield process
    assert process.is_alive()
    if before != (after := process.counts()):
        raise AssertionError(f"{before} became {after}")


@pytest.fixture
def daemon(daemons: dict[str, DaemonProcess]) -> Iterator[DaemonProcess]:
    yield from unharmed(daemons["patient"])


@pytest.fixture
def hasty(daemons: dict[str, DaemonProcess]) -> Iterator[DaemonProcess]:
    yield from unharmed(daemons["hasty"])


@pytest.fixture
def raw(daemon: DaemonProcess) -> Iterator[RawConnection]:
    with daemon.connect() as connection:
        yield connection


def last_reply(daemon: DaemonProcess, *parts: bytes | str) -> Reply:
    """The one reply on a connection of its own, which the daemon then closes."""
    with daemon.connect() as connection:
        return connection.send(*parts).last_reply()


def head_of(daemon: DaemonProcess, seed: str) -> bytes:
    """A signed offer up to where its length stands."""
    return daemon.offer(seed)[1].partition(b"content-length")[0]


# Time


@each("sent", [b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\nhost: miner\r\n"])
def test_headers_that_do_not_come_are_not_waited_for(hasty: DaemonProcess, sent: bytes) -> None:
    reply = last_reply(hasty, sent)
    assert (reply.status, reply.error) == (408, "headers_too_slow")


@pytest.mark.parametrize("what", ["headers", "body"])
def test_a_request_that_drips_is_not_waited_for(hasty: DaemonProcess, what: str) -> None:
    ends = time.monotonic() + PATIENCE
    drop = b" " if what == "body" else b"x: y\r\n"
    begun = hasty.offer("drip")[1][:-100] if what == "body" else b"GET /healthz HTTP/1.1\r\n"
    with hasty.connect() as raw:
        raw.send(begun)
        while raw.silent(0.05):
            assert time.monotonic() < ends
            raw.send_until_refused(drop, 1)
        assert raw.last_reply().error == f"{what}_too_slow"


def test_those_who_keep_their_bodies_back_do_not_take_the_places_of_others(hasty: DaemonProcess) -> None:
    """Which hotkeys are validators' is public, so anybody can get as far as a body."""
    begun = [hasty.offer(f"held {number}")[1][:-1] for number in range(20)]
    whole = hasty.get("/training_repo/text")
    held = [hasty.connect().send(most) for most in begun]
    assert hasty.ask(request("/healthz")).status == 200
    assert hasty.ask(whole).error == "not_entered"
    for raw in held:
        with raw:
            reply = raw.last_reply()
            assert (reply.status, reply.error) == (408, "body_too_slow")


# Size


@each("length", [str(HUNDRED_MB), "0" * 30 + str(HUNDRED_MB), "4194305"])
def test_a_large_body_is_refused_before_it_is_sent(daemon: DaemonProcess, length: str) -> None:
    reply = last_reply(daemon, head_of(daemon, "announced"), f"content-length: {length}\r\n\r\n")
    assert (reply.status, reply.error) == (413, "body_too_large")
    assert length.lstrip("0") in reply.json["message"]


@each("length", ["-1", "1e3", "0x10", "9" * 25, "9" * 5000, "1, 1", ""])
def test_an_invalid_length_is_refused(daemon: DaemonProcess, length: str) -> None:
    reply = last_reply(daemon, head_of(daemon, "invalid"), f"content-length: {length}\r\n\r\n")
    assert reply.error == "not_http"


def test_a_hundred_megabytes_are_refused_at_the_limit(daemon: DaemonProcess, raw: RawConnection) -> None:
    before = daemon.memory_mb()
    raw.send(head_of(daemon, "chunked"), "transfer-encoding: chunked\r\n\r\n")
    sent = raw.send_until_refused(chunk(os.urandom(64 * 1024)), HUNDRED_MB)
    # What the two sockets hold between them goes out unread.
    assert sent < 25 * 1024**2
    assert raw.reply().error == "body_too_large"
    assert daemon.memory_mb() - before < 40


def test_a_client_that_sends_all_before_it_reads_still_gets_its_reply(
    daemon: DaemonProcess, raw: RawConnection
) -> None:
    raw.send_until_refused(head_of(daemon, "sent") + b"content-length: %d\r\n\r\n" % HUNDRED_MB, 1)
    raw.send_until_refused(b"x" * 65536, HUNDRED_MB)
    assert raw.reply().error == "body_too_large"


@each(
    "flood",
    [
        "".join(f"x-{number}: y\r\n" for number in range(65)),
        "x: " + "y" * 16_400 + "\r\n",
        "x" * 16_400 + ": y\r\n",
        "".join(f"x-{number}: {'y' * 400}\r\n" for number in range(45)),
    ],
)
def test_too_many_and_too_large_headers_are_refused(daemon: DaemonProcess, flood: str) -> None:
    reply = last_reply(daemon, "GET /healthz HTTP/1.1\r\nhost: miner\r\n", flood, "\r\n")
    assert (reply.status, reply.error) == (431, "headers_too_large")


@pytest.mark.parametrize("endless", ["x-more: y\r\n", "y" * 100], ids=["headers", "one header"])
def test_headers_without_an_end_are_refused_at_the_limit(raw: RawConnection, endless: str) -> None:
    raw.send("GET /healthz HTTP/1.1\r\nx: ")
    sent = raw.send_until_refused(endless.encode() * 100, 50 * 1024**2)
    assert sent < 10 * 1024**2
    assert raw.reply().error == "headers_too_large"


def test_connections_beyond_the_limit_get_a_refusal(tmp_path: Path) -> None:
    with run_daemon_process(tmp_path / "daemon", PATIENT) as daemon, ExitStack() as stack:
        connections = [stack.enter_context(daemon.connect()) for _ in range(60)]
        ends = time.monotonic() + PATIENCE
        # A quarter of the 40 is kept for validators that were let in before.
        while len(refused := [raw for raw in connections if not raw.silent(0.001)]) < 30:
            assert time.monotonic() < ends
        assert [raw.last_reply().error for raw in refused] == ["busy"] * 30


# Sense

NOT_HTTP = {
    "tls": bytes.fromhex("16030100f8010000f403") + bytes(range(200)),
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "zeros": bytes(1000),
    "noise": Random(1).randbytes(1000),
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http/9.9": b"GET /healthz HTTP/9.9\r\n\r\n",
    "redis": b"*1\r\n$4\r\nPING\r\n",
    "unknown method": b"BREW /healthz HTTP/1.1\r\n\r\n",
    "no target": b"GET  HTTP/1.1\r\n\r\n",
    "blank in name": b"GET /healthz HTTP/1.1\r\nna me: x\r\n\r\n",
    "no colon": b"GET /healthz HTTP/1.1\r\nname\r\n\r\n",
    "zero in value": b"GET /healthz HTTP/1.1\r\nname: a\0b\r\n\r\n",
    "folded line": b"GET /healthz HTTP/1.1\r\nname: a\r\n b: c\r\n\r\n",
    "bare newlines": b"GET /healthz HTTP/1.1\nhost: miner\n\n",
    "both lengths": b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
    "odd coding": b"POST / HTTP/1.1\r\ntransfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "bad chunk": b"POST /task_offer/ HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "path not ascii": "GET /é HTTP/1.1\r\n\r\n".encode(),
    "connect": b"CONNECT example.com:443 HTTP/1.1\r\n\r\n",
}


@each("name", NOT_HTTP)
def test_what_is_not_http_gets_a_400_and_is_hung_up_on(daemon: DaemonProcess, name: str) -> None:
    reply = last_reply(daemon, NOT_HTTP[name])
    assert (reply.status, reply.error, reply.closes) == (400, "not_http", True)


def test_two_hosts_are_refused(daemon: DaemonProcess) -> None:
    """The operator's port refuses them too: it serves by the same protocol."""
    for port in (daemon.port, daemon.stack.operator_port):
        with RawConnection(port) as raw:
            reply = raw.send(
                request("/healthz").replace(b"\r\n", b"\r\nHost: a\r\nhost: b\r\n", 1)
            ).last_reply()
        assert (reply.status, reply.error) == (400, "two_hosts")


def test_a_header_given_twice_or_not_in_ascii_is_refused(daemon: DaemonProcess) -> None:
    whole = daemon.offer("spoilt")[1]
    line = next(line for line in whole.split(b"\r\n") if line.startswith(b"signature"))
    for spoilt in (line + b"\r\n" + line.upper(), line[:-1] + "é".encode()):
        reply = daemon.ask(whole.replace(line, spoilt))
        assert (reply.status, reply.error) == (400, "header_invalid")
        assert "signature" in reply.json["message"]


@each(
    ("method", "target", "status"),
    [
        ("HEAD", "/healthz", 405),
        ("HEAD", "/task_offer/", 405),
        ("OPTIONS", "/task_offer/", 405),
        ("OPTIONS", "/", 404),
        ("TRACE", "/healthz", 405),
        ("PURGE", "/task_offer/", 405),
        ("POST", "/get_latest_model_submission/x", 405),
        ("GET", "/get_latest_model_submission/x", 422),
    ],
)
def test_refused_requests_are_json_and_leave_the_connection_usable(
    raw: RawConnection, method: str, target: str, status: int
) -> None:
    reply = raw.send(request(target, method=method)).reply(to_head=method == "HEAD")
    assert (reply.status, reply.headers["content-type"]) == (status, "application/json")
    if status == 405:
        assert reply.headers["allow"] in ("GET", "POST")
    assert raw.send(request("/healthz")).reply().status == 200


# Ways to speak

UPGRADE = {"connection": "upgrade", "sec-websocket-key": "x" * 22 + "=="}


@each(
    "whole",
    [
        request("/healthz", {"connection": "keep-alive"}, version="HTTP/1.0"),
        b"GET /healthz\r\n\r\n",  # HTTP/0.9
        request("/healthz", {"connection": "close"}),
        request("/healthz", {**UPGRADE, "upgrade": "h2c"}),
        request("/healthz", {**UPGRADE, "upgrade": "websocket"}),
    ],
)
def test_some_requests_are_answered_and_hung_up_on(daemon: DaemonProcess, whole: bytes) -> None:
    assert last_reply(daemon, whole).json["status"] == "ok"


def test_one_connection_serves_many_requests(raw: RawConnection) -> None:
    others = {"x": "é\xff", "cookie": "a=b"}  # headers that are not ours may hold what they like
    for _ in range(100):
        assert raw.send(request("/healthz", others)).reply().status == 200
        assert raw.send(request("http://miner/healthz?x=1")).reply().status == 200


def test_a_client_that_hangs_up_in_the_middle_of_its_body_leaves_nothing(daemon: DaemonProcess) -> None:
    whole = daemon.offer("gone")[1]
    with daemon.connect() as gone:
        gone.send(head_of(daemon, "gone"), b"transfer-encoding: chunked\r\n\r\n", chunk(b"{"))
    for cut in (-1, -50, len(whole) // 2):
        with daemon.connect() as gone:
            gone.send(whole[:cut])
        with daemon.connect() as rude:
            rude.send(whole[:cut]).reset()


def test_garbage_in_pieces_of_any_size_gets_one_whole_refusal_or_none(daemon: DaemonProcess) -> None:
    random = Random(2)
    for _ in range(40):
        garbage = random.choice(list(NOT_HTTP.values()))
        with daemon.connect() as raw:
            for start in range(0, len(garbage), step := random.randint(1, 200)):
                raw.send_until_refused(garbage[start : start + step], 1)
            assert raw.end().last_reply().error == "not_http"


def test_json_comes_back_whatever_was_sent(daemon: DaemonProcess) -> None:
    """Mutations of a good request: each gets whole JSON replies, or the connection is closed."""
    random = Random(3)
    good = request("/healthz") + request("/task_offer/", body=b'{"a": 1}')
    for _ in range(60):
        sent = bytearray(good)
        for _ in range(random.randint(1, 4)):
            sent[random.randrange(len(sent))] = random.randrange(256)
        with daemon.connect() as raw:
            raw.send(bytes(sent)).end()
            while not raw.at_end():
                reply = raw.reply()
                assert 200 <= reply.status < 500
                json.loads(reply.body)


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[DaemonProcess]:
    with run_daemon_process(tmp_path, {}) as running:
        yield running


@contextmanager
def slow_client(port: int, address: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-S", "-E", slow_clients.__file__, str(port), address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process  # leaving closes its standard input, which ends it


def test_validators_are_answered_while_twelve_addresses_hold_what_they_can(crowded: DaemonProcess) -> None:
    with crowded.connect() as raw:
        assert raw.send(crowded.get("/training_repo/text")).reply().error == "not_entered"
    known, new = "127.0.0.1", "127.0.0.77"
    with ExitStack() as stack:
        clients = [
            stack.enter_context(slow_client(crowded.port, f"127.0.1.{number}")) for number in range(1, 13)
        ]
        for client in clients:  # every one has been hung up on: all places are taken
            assert client.stdout.readline() == slow_clients.FULL
        for address in (known, new):
            seconds = []
            for _ in range(20):
                began = time.monotonic()
                with RawConnection(crowded.port, address=address) as raw:
                    assert raw.send(crowded.get("/training_repo/text")).reply().error == "not_entered"
                seconds.append(time.monotonic() - began)
            assert statistics.median(seconds) < 1.0


def test_the_operator_is_answered_while_others_hold_connections_without_the_token(
    crowded: DaemonProcess,
) -> None:
    """Every user of the machine can open them, and all come from the operator's own address."""
    port, signed = crowded.stack.operator_port, crowded.stack.operator_headers()
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
