"""Several requests on one connection: every reply whole, in order, and never one too many."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from miner.http import limits
from miner.http.limits import MAX_QUEUED
from tests.doubles.http_bytes import chunk, request
from tests.miner.http.protocol_server import (
    HASTY,
    HASTY_KEEP_ALIVE,
    ProtocolServer,
    be_hasty,
    run_protocol_server,
)
from tests.miner.http.raw_connection import PATIENCE, RawConnection

pytestmark = pytest.mark.process


#: The beginning of a request whose body has ten bytes.
TEN = " HTTP/1.1\r\ncontent-length: 10\r\n\r\n"
CHUNKED = " HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[ProtocolServer]:
    with run_protocol_server() as running:
        yield running


@pytest.fixture
def hasty(server: ProtocolServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[RawConnection]:
    """A connection to a server that does not wait long."""
    be_hasty(server, monkeypatch)
    with RawConnection(server.port) as connection:
        yield connection


@pytest.fixture
def raw(server: ProtocolServer) -> Iterator[RawConnection]:
    with RawConnection(server.port) as connection:
        yield connection


def eventually(true: Callable[[], bool]) -> bool:
    ends = time.monotonic() + PATIENCE
    while not true() and time.monotonic() < ends:
        time.sleep(0.01)
    return true()


def started(server: ProtocolServer, path: str) -> None:
    server.wait_until(lambda: path in server.started)


def test_requests_sent_at_once_are_answered_in_order(server: ProtocolServer, raw: RawConnection) -> None:
    paths = ["/now/1", "/body/2", "/wait/3", "/now/4"]
    raw.send(*(request(path, body=b"x" * 2000) for path in paths))
    started(server, "/wait/3")
    server.release("/wait/3")
    assert [raw.reply().json["path"] for _ in paths] == paths


@pytest.mark.parametrize(
    ("second", "status", "error"),
    [
        ("no http at all\r\n\r\n", 400, "not_http"),
        ("GET /now HTTP/1.1\r\nhost: ", 408, "headers_too_slow"),
        ("POST /body/never HTTP/1.1\r\ncontent-length: 10001\r\n\r\n", 413, "body_too_large"),
        ("POST /body/never" + CHUNKED + chunk(b"x" * 10_001).decode(), 413, "body_too_large"),
    ],
    ids=["not http", "slow", "large", "large chunk"],
)
def test_a_refused_second_request_waits_for_the_reply_to_the_first(
    server: ProtocolServer,
    raw: RawConnection,
    second: str,
    status: int,
    error: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, before = f"/wait/second/{len(second)}", server.refused.count(status)
    if error == "headers_too_slow":
        be_hasty(server, monkeypatch)
    raw.send(request(path), second, request("/now/after") if status == 413 else "")
    started(server, path)
    server.wait_until(lambda: server.refused.count(status) > before)
    server.release(path)
    assert raw.reply().json == {"path": path}
    assert raw.last_reply().error == error
    assert not {"/body/never", "/now/after"} & set(server.started)


def test_a_body_that_goes_on_after_the_reply_is_not_answered_again(raw: RawConnection) -> None:
    raw.send("POST /now/early" + CHUNKED)
    assert raw.reply().json == {"path": "/now/early"}
    raw.send_until_refused(chunk(b"x" * 5000), 200_000)
    assert raw.closed()


@pytest.mark.parametrize("body", [b"", b"x" * 10], ids=["stays away", "comes late"])
def test_a_body_nobody_read_ends_the_connection_in_silence(hasty: RawConnection, body: bytes) -> None:
    hasty.send("POST /now/unread" + TEN)
    assert hasty.reply().status == 200
    hasty.send(body)  # now it is idle
    assert hasty.closed()


def test_a_connection_goes_on_after_a_body_nobody_read(raw: RawConnection) -> None:
    raw.send("POST /now/unread" + TEN)
    assert raw.reply().status == 200
    raw.send(b"x" * 10, request("/now/next"))
    assert raw.reply().json == {"path": "/now/next"}


def test_blank_lines_between_requests_keep_no_connection_open(hasty: RawConnection) -> None:
    hasty.send(request("/now/blank"))
    assert hasty.reply().status == 200
    ends = time.monotonic() + PATIENCE
    while hasty.silent(0.05):
        assert time.monotonic() < ends
        hasty.send_until_refused(b"\r\n", 1)


@pytest.mark.parametrize(("rest", "error"), [(TEN + "123", "body"), (" HTTP/1.1\r\n", "headers")])
def test_a_request_that_begins_where_a_body_ends_has_its_time_limit(
    server: ProtocolServer, raw: RawConnection, rest: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw.send(f"POST /body/one/{error}" + TEN + "12345")
    started(server, f"/body/one/{error}")
    be_hasty(server, monkeypatch)
    raw.send("67890POST /body/two" + rest)
    assert raw.reply().json == {"path": f"/body/one/{error}"}
    assert raw.last_reply().error == f"{error}_too_slow"


def test_a_body_that_we_keep_waiting_has_time_enough(server: ProtocolServer, hasty: RawConnection) -> None:
    hasty.send(request("/wait/busy"), "POST /body/patient" + TEN)
    started(server, "/wait/busy")
    hasty.send("1234567890")
    assert hasty.silent(2 * HASTY.body_seconds)  # nothing is read while the first is being answered
    server.release("/wait/busy")
    assert hasty.reply().json == {"path": "/wait/busy"}
    assert hasty.reply().json == {"path": "/body/patient"}


def test_whoever_waits_for_a_body_learns_that_it_will_not_come(
    server: ProtocolServer, hasty: RawConnection
) -> None:
    hasty.send("POST /body/lost" + TEN + "123")
    assert hasty.last_reply().error == "body_too_slow"
    server.wait_until(lambda: "/body/lost" in server.disconnected)


def test_a_half_closed_connection_still_gets_its_replies(server: ProtocolServer, raw: RawConnection) -> None:
    raw.send(request("/wait/half"), request("/now/half")).end()
    started(server, "/wait/half")
    server.release("/wait/half")
    assert raw.reply().json == {"path": "/wait/half"}
    assert raw.last_reply().json == {"path": "/now/half"}


def test_a_half_closed_connection_without_a_whole_request_is_closed(server: ProtocolServer) -> None:
    with RawConnection(server.port) as raw:
        assert raw.end().closed()
    with RawConnection(server.port) as raw:
        raw.send("POST /body/half" + TEN + "123").end()
        server.wait_until(lambda: "/body/half" in server.disconnected)
        assert raw.closed()


def test_a_request_to_change_protocols_is_answered_as_it_is(raw: RawConnection) -> None:
    upgrade = {"connection": "upgrade, http2-settings", "upgrade": "h2c", "http2-settings": "AAMAAABk"}
    raw.send(request("/now/upgrade", upgrade), b"whatever comes now is no HTTP")
    assert raw.last_reply().json == {"path": "/now/upgrade"}


@pytest.mark.parametrize("body", ["content-length: 5\r\n\r\nhello", "transfer-encoding: chunked\r\n\r\n"])
def test_a_body_that_an_upgrade_would_hide_is_refused(raw: RawConnection, body: str) -> None:
    raw.send("POST /body/upgrade HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n", body)
    reply = raw.last_reply()
    assert (reply.status, reply.error) == (400, "no_upgrade")


def test_trailers_and_chunk_extensions_have_an_end(server: ProtocolServer) -> None:
    with RawConnection(server.port) as raw:
        raw.send("POST /body/trailers" + CHUNKED, chunk(b"x"), "0\r\n")
        raw.send_until_refused(b"trailer: " + b"x" * 1000 + b"\r\n", 1_000_000)
        assert raw.last_reply().error in ("body_too_large", "headers_too_large")
    with RawConnection(server.port) as raw:
        raw.send("POST /body/extensions" + CHUNKED + "1;x=")
        raw.send_until_refused(b"x" * 1000, 1_000_000)
        assert raw.last_reply().error == "body_too_large"


def test_only_so_many_requests_may_wait_on_one_connection(server: ProtocolServer, raw: RawConnection) -> None:
    raw.send(request("/wait/queue"), request("/now/queue") * (MAX_QUEUED + 100))
    server.wait_until(lambda: 429 in server.refused)
    server.release("/wait/queue")
    assert [raw.reply().status for _ in range(1 + MAX_QUEUED)] == [200] * (1 + MAX_QUEUED)
    assert raw.last_reply().error == "too_many_queued"


@pytest.mark.parametrize("size", [30_000, 1_000_000])
def test_who_does_not_read_its_reply_is_not_waited_for(size: int) -> None:
    """The smaller one fits under the mark at which a transport reports that it is full."""
    with (
        run_protocol_server(HASTY, keep_alive=HASTY_KEEP_ALIVE, send_buffer=4096) as server,
        RawConnection(server.port, receive_buffer=4096) as raw,
    ):
        raw.send(request(f"/big/{size}"))
        started(server, f"/big/{size}")
        assert eventually(lambda: server.connections == 0)


def test_a_server_that_stops_answers_what_it_began() -> None:
    with (
        run_protocol_server() as server,
        RawConnection(server.port) as raw,
        RawConnection(server.port) as idle,
    ):
        idle.send(request("/now/idle"))
        assert idle.reply().status == 200
        raw.send(request("/wait/last"), request("/now/last"))
        started(server, "/wait/last")
        server.uvicorn.should_exit = True
        assert idle.closed()
        server.release("/wait/last")
        assert raw.reply().json == {"path": "/wait/last"}
        assert raw.last_reply().json == {"path": "/now/last"}


def test_a_request_that_was_just_written_when_the_daemon_stops_is_answered_as_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "DRAIN_SECONDS", PATIENCE)
    with run_protocol_server() as server, RawConnection(server.port) as raw:
        assert not raw.send(request("/now/1")).reply().closes
        server.uvicorn.should_exit = True
        assert eventually(lambda: not listens(server.port))
        reply = raw.send(request("/now/2")).last_reply()
        assert (reply.json["path"], reply.closes) == ("/now/2", True)


def listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def test_a_reply_is_read_by_a_client_that_goes_on_sending_its_body(
    server: ProtocolServer, raw: RawConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LINGER_SECONDS", PATIENCE)
    raw.send("POST /now HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 5000\r\n\r\nx")
    reply = raw.last_reply()  # our side is closed, and what comes is read
    for _ in range(20):
        raw.send(b"x" * 100)
        time.sleep(0.001)
    assert (reply.status, reply.closes) == (200, True)
    raw.end()
    assert eventually(lambda: not server.connections)
