"""Several requests on one connection: every reply whole, in order, and never one too many."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from miner.api import protocol
from miner.api.protocol import MAX_QUEUED
from tests.miner.api.bench import LIMITS, Bench, bench
from tests.miner.api.raw import PATIENCE, Raw, chunk, request


@pytest.fixture(scope="module")
def server() -> Iterator[Bench]:
    with bench() as made:
        yield made


@pytest.fixture
def raw(server: Bench) -> Iterator[Raw]:
    with Raw(server.port) as made:
        yield made


def eventually(true: Callable[[], bool]) -> bool:
    ends = time.monotonic() + PATIENCE
    while not true() and time.monotonic() < ends:
        time.sleep(0.01)
    return true()


def begun(server: Bench, path: str) -> None:
    server.wait_until(lambda: path in server.begun)


def test_requests_sent_at_once_are_answered_in_order(server: Bench, raw: Raw) -> None:
    paths = ["/now/1", "/body/2", "/wait/3", "/now/4"]
    raw.send(*(request(path, body=b"x" * 2000) for path in paths))
    begun(server, "/wait/3")
    server.let_go("/wait/3")
    assert [raw.reply().json()["path"] for _ in paths] == paths


def test_what_is_refused_waits_for_the_answers_before_it(server: Bench, raw: Raw) -> None:
    raw.send(request("/wait/first"))
    begun(server, "/wait/first")
    raw.send("no http at all\r\n\r\n")
    server.wait_until(lambda: 400 in server.refused)
    server.let_go("/wait/first")
    assert raw.reply().json() == {"path": "/wait/first"}
    assert raw.last_reply().error == "not_http"


def test_a_slow_second_request_does_not_take_the_first_ones_answer(server: Bench, raw: Raw) -> None:
    raw.send(request("/wait/slow-second"))
    begun(server, "/wait/slow-second")
    before = server.refused.count(408)
    raw.send("GET /now HTTP/1.1\r\nhost: ")
    server.wait_until(lambda: server.refused.count(408) > before)
    server.let_go("/wait/slow-second")
    assert raw.reply().json() == {"path": "/wait/slow-second"}
    assert raw.last_reply().error == "headers_too_slow"


@pytest.mark.parametrize("body", ["content-length: 10001\r\n\r\n", "transfer-encoding: chunked\r\n\r\n"])
def test_a_large_second_request_does_not_take_the_first_ones_answer(
    server: Bench, raw: Raw, body: str
) -> None:
    path = f"/wait/large-second/{len(body)}"
    before = server.refused.count(413)
    raw.send(
        request(path), "POST /body/never HTTP/1.1\r\n" + body, chunk(b"x" * 10_001), request("/now/after")
    )
    begun(server, path)
    server.wait_until(lambda: server.refused.count(413) > before)
    server.let_go(path)
    assert raw.reply().json() == {"path": path}
    assert raw.last_reply().error == "body_too_large"
    assert "/body/never" not in server.begun
    assert "/now/after" not in server.begun


def test_nothing_is_done_for_what_follows_a_refusal(server: Bench, raw: Raw) -> None:
    raw.send(
        "POST /body/huge HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n",
        chunk(b"x" * 10_001),
        "0\r\n\r\n",
        request("/now/smuggled"),
    )
    assert raw.last_reply().error == "body_too_large"
    assert "/now/smuggled" not in server.begun


def test_a_body_that_goes_on_after_the_answer_is_not_answered_again(server: Bench, raw: Raw) -> None:
    raw.send("POST /now/early HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
    assert raw.reply().json() == {"path": "/now/early"}
    raw.send_until_refused(chunk(b"x" * 5000), 200_000)
    assert raw.closed()


def test_a_body_that_stays_away_after_the_answer_ends_in_silence(server: Bench, raw: Raw) -> None:
    raw.send("POST /now/left HTTP/1.1\r\ncontent-length: 10\r\n\r\n")
    assert raw.reply().status == 200
    assert raw.closed()


def test_a_connection_goes_on_after_a_body_nobody_read(server: Bench, raw: Raw) -> None:
    raw.send("POST /now/unread HTTP/1.1\r\ncontent-length: 10\r\n\r\n")
    assert raw.reply().status == 200
    raw.send(b"x" * 10, request("/now/next"))
    assert raw.reply().json() == {"path": "/now/next"}


def test_after_a_body_nobody_read_the_connection_is_idle_and_ends(server: Bench, raw: Raw) -> None:
    raw.send("POST /now/idle HTTP/1.1\r\ncontent-length: 10\r\n\r\n")
    assert raw.reply().status == 200
    raw.send(b"x" * 10)
    assert raw.closed()


def test_blank_lines_between_requests_keep_no_connection_open(server: Bench, raw: Raw) -> None:
    raw.send(request("/now/blank"))
    assert raw.reply().status == 200
    for _ in range(600):
        if not raw.silent(0.05):
            break
        raw.send_until_refused(b"\r\n", 1)
    else:
        raise AssertionError("still open after half a minute of blank lines")


def test_a_body_that_begins_where_another_ends_has_its_time_limit(server: Bench, raw: Raw) -> None:
    raw.send("POST /body/one HTTP/1.1\r\ncontent-length: 10\r\n\r\n12345")
    begun(server, "/body/one")
    raw.send("67890POST /body/two HTTP/1.1\r\ncontent-length: 10\r\n\r\n123")
    assert raw.reply().json() == {"path": "/body/one"}
    assert raw.last_reply().error == "body_too_slow"


def test_headers_that_begin_where_a_body_ends_have_their_time_limit(server: Bench, raw: Raw) -> None:
    raw.send("POST /body/three HTTP/1.1\r\ncontent-length: 10\r\n\r\n12345")
    begun(server, "/body/three")
    raw.send("67890POST /body/four HTTP/1.1\r\n")
    assert raw.reply().json() == {"path": "/body/three"}
    assert raw.last_reply().error == "headers_too_slow"


def test_a_body_that_we_keep_waiting_has_time_enough(server: Bench, raw: Raw) -> None:
    raw.send(request("/wait/busy"), "POST /body/patient HTTP/1.1\r\ncontent-length: 10\r\n\r\n")
    begun(server, "/wait/busy")
    raw.send("1234567890")
    assert raw.silent(2 * LIMITS.body_seconds)  # nothing is read while the first is being answered
    server.let_go("/wait/busy")
    assert raw.reply().json() == {"path": "/wait/busy"}
    assert raw.reply().json() == {"path": "/body/patient"}


def test_whoever_waits_for_a_body_is_told_that_it_will_not_come(server: Bench, raw: Raw) -> None:
    raw.send("POST /body/lost HTTP/1.1\r\ncontent-length: 10\r\n\r\n123")
    assert raw.last_reply().error == "body_too_slow"
    server.wait_until(lambda: "/body/lost" in server.hung_up)


def test_a_half_closed_connection_still_gets_its_answers(server: Bench, raw: Raw) -> None:
    raw.send(request("/wait/half"), request("/now/half")).end()
    begun(server, "/wait/half")
    server.let_go("/wait/half")
    assert raw.reply().json() == {"path": "/wait/half"}
    assert raw.last_reply().json() == {"path": "/now/half"}


def test_a_half_closed_connection_without_a_request_is_closed(server: Bench, raw: Raw) -> None:
    assert raw.end().closed()


def test_half_a_body_and_no_more_is_no_request(server: Bench, raw: Raw) -> None:
    raw.send("POST /body/half HTTP/1.1\r\ncontent-length: 10\r\n\r\n123").end()
    server.wait_until(lambda: "/body/half" in server.hung_up)
    assert raw.closed()


def test_a_request_to_change_protocols_is_answered_as_it_is(server: Bench, raw: Raw) -> None:
    upgrade = {"connection": "upgrade, http2-settings", "upgrade": "h2c", "http2-settings": "AAMAAABk"}
    raw.send(request("/now/upgrade", upgrade), b"whatever comes now is no HTTP")
    assert raw.last_reply().json() == {"path": "/now/upgrade"}


@pytest.mark.parametrize("body", ["content-length: 5\r\n\r\nhello", "transfer-encoding: chunked\r\n\r\n"])
def test_a_body_that_an_upgrade_would_hide_is_refused(raw: Raw, body: str) -> None:
    raw.send("POST /body/upgrade HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n", body)
    reply = raw.last_reply()
    assert (reply.status, reply.error) == (400, "no_upgrade")


def test_trailers_are_no_headers_and_have_an_end(server: Bench, raw: Raw) -> None:
    raw.send("POST /body/trailers HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", chunk(b"x"), "0\r\n")
    raw.send_until_refused(b"trailer: " + b"x" * 1000 + b"\r\n", 1_000_000)
    assert raw.last_reply().error in ("body_too_large", "headers_too_large")


def test_chunk_extensions_have_an_end(server: Bench, raw: Raw) -> None:
    raw.send("POST /body/extensions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1;x=")
    raw.send_until_refused(b"x" * 1000, 1_000_000)
    assert raw.last_reply().error == "body_too_large"


def test_only_so_many_requests_may_wait_on_one_connection(server: Bench, raw: Raw) -> None:
    raw.send(request("/wait/queue"), request("/now/queue") * (MAX_QUEUED + 100))
    server.wait_until(lambda: 429 in server.refused)
    server.let_go("/wait/queue")
    assert [raw.reply().status for _ in range(1 + MAX_QUEUED)] == [200] * (1 + MAX_QUEUED)
    assert raw.last_reply().error == "too_many_queued"


@pytest.mark.parametrize("size", [30_000, 1_000_000])
def test_who_does_not_read_its_reply_is_not_waited_for(size: int) -> None:
    """The smaller one fits under the mark at which a transport tells that it is full."""
    with bench(send_buffer=4096) as server, Raw(server.port, receive_buffer=4096) as raw:
        raw.send(request(f"/big/{size}"))
        server.wait_until(lambda: f"/big/{size}" in server.begun)
        assert eventually(lambda: server.connections == 0)


def test_a_server_that_stops_answers_what_it_began() -> None:
    with bench() as server, Raw(server.port) as raw, Raw(server.port) as idle:
        idle.send(request("/now/idle"))
        assert idle.reply().status == 200
        raw.send(request("/wait/last"), request("/now/last"))
        begun(server, "/wait/last")
        server.server.should_exit = True
        assert idle.closed()
        server.let_go("/wait/last")
        assert raw.reply().json() == {"path": "/wait/last"}
        assert raw.last_reply().json() == {"path": "/now/last"}


def test_a_request_that_was_just_written_when_the_daemon_stops_is_answered_as_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "DRAIN_SECONDS", PATIENCE)
    with bench(keep_alive=PATIENCE) as server, Raw(server.port) as raw:
        assert not raw.send(request("/now/1")).reply().closes
        server.server.should_exit = True
        assert eventually(lambda: not listens(server.port))
        found = raw.send(request("/now/2")).last_reply()
        assert (found.json()["path"], found.closes) == ("/now/2", True)


def listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def test_a_refusal_is_read_by_a_client_that_goes_on_sending_its_body(
    server: Bench, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "LINGER_SECONDS", PATIENCE)
    raw.send("POST /now HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 5000\r\n\r\nx")
    found = raw.last_reply()  # our side is closed, and what comes is read
    for _ in range(20):
        raw.send(b"x" * 100)
        time.sleep(0.001)
    assert (found.status, found.closes) == (200, True)
    raw.end()
    assert eventually(lambda: not server.connections)
