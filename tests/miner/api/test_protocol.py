"""What strangers do to a port: bytes of every kind against the real daemon, which answers, and lives."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from miner.fiber import AUTH_HEADERS
from tests.miner.api.live import SHORT, Live, live
from tests.miner.api.raw import PATIENCE, Raw, chunk, request

pytestmark = pytest.mark.integration

HUNDRED_MB = 100 * 1024**2


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("daemon")) as made:
        yield made
    # All of the above was other people's doing, none of it is worth a line that wakes somebody.
    assert made.logged("WARNING", "ERROR", "CRITICAL") == []


@pytest.fixture(autouse=True)
def unharmed(daemon: Live) -> Iterator[None]:
    """Refused is refused: nothing is stored, and the daemon lives."""
    before = daemon.counts()
    yield
    assert daemon.is_alive()
    if before != (after := daemon.counts()):
        raise AssertionError(f"{before} became {after}")


@pytest.fixture
def raw(daemon: Live) -> Iterator[Raw]:
    with daemon.raw() as made:
        yield made


# Time


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\nhost: miner\r\n"])
def test_headers_that_do_not_come_are_not_waited_for(raw: Raw, sent: bytes) -> None:
    reply = raw.send(sent).last_reply()
    assert (reply.status, reply.error) == (408, "headers_too_slow")


def test_headers_that_drip_are_not_waited_for(raw: Raw) -> None:
    began = time.monotonic()
    raw.send(b"GET /healthz HTTP/1.1\r\n")
    while raw.silent(0.05) and time.monotonic() - began < PATIENCE:
        raw.send_until_refused(b"x: y\r\n", 1)
    assert raw.last_reply().error == "headers_too_slow"
    assert time.monotonic() - began < PATIENCE


def test_a_body_that_does_not_come_is_not_waited_for(daemon: Live, raw: Raw) -> None:
    _, whole = daemon.offer("slow")
    reply = raw.send(whole[:-10]).last_reply()
    assert (reply.status, reply.error) == (408, "body_too_slow")


def test_a_body_that_drips_is_not_waited_for(daemon: Live, raw: Raw) -> None:
    began = time.monotonic()
    raw.send(daemon.offer("drip")[1][:-100])
    while raw.silent(0.05) and time.monotonic() - began < PATIENCE:
        raw.send_until_refused(b" ", 1)
    assert raw.last_reply().error == "body_too_slow"
    assert time.monotonic() - began < PATIENCE


def test_those_who_keep_their_bodies_back_do_not_take_the_places_of_others(daemon: Live) -> None:
    """Which hotkeys are validators' is public, so anybody can get as far as a body."""
    held = [daemon.raw().send(daemon.offer(f"held {number}")[1][:-1]) for number in range(20)]
    assert daemon.ask(request("/healthz")).status == 200
    assert daemon.ask(daemon.get("/training_repo/text")).error == "not_entered"
    for raw in held:
        with raw:
            assert raw.last_reply().error == "body_too_slow"


# Size


def test_a_large_body_is_refused_before_it_is_sent(daemon: Live, raw: Raw) -> None:
    head = daemon.offer("announced")[1].partition(b"content-length")[0]
    reply = raw.send(head, f"content-length: {HUNDRED_MB}\r\n\r\n").last_reply()
    assert (reply.status, reply.error) == (413, "body_too_large")
    assert str(HUNDRED_MB) in reply.json()["message"]


@pytest.mark.parametrize("length", ["0" * 30 + "104857600", "4194305"])
def test_the_length_is_read_as_a_number(daemon: Live, raw: Raw, length: str) -> None:
    head = daemon.offer("number")[1].partition(b"content-length")[0]
    assert raw.send(head, f"content-length: {length}\r\n\r\n").last_reply().error == "body_too_large"


@pytest.mark.parametrize("length", ["-1", "1e3", "0x10", "9" * 25, "9" * 5000, "1, 1", ""])
def test_a_length_that_is_none_is_refused(daemon: Live, raw: Raw, length: str) -> None:
    head = daemon.offer("none")[1].partition(b"content-length")[0]
    assert raw.send(head, f"content-length: {length}\r\n\r\n").last_reply().error == "not_http"


def test_a_hundred_megabytes_are_refused_at_the_limit(daemon: Live, raw: Raw) -> None:
    before = daemon.memory_mb()
    head = daemon.offer("chunked")[1].partition(b"content-length")[0]
    raw.send(head, "transfer-encoding: chunked\r\n\r\n")
    sent = raw.send_until_refused(chunk(os.urandom(64 * 1024)), HUNDRED_MB)
    # What the two sockets hold between them goes out unread.
    assert sent < 25 * 1024**2
    assert raw.reply().error == "body_too_large"
    assert daemon.memory_mb() - before < 40


def test_a_client_that_sends_all_before_it_reads_still_gets_its_answer(daemon: Live, raw: Raw) -> None:
    head = daemon.offer("sent")[1].partition(b"content-length")[0]
    raw.send_until_refused(head + b"content-length: %d\r\n\r\n" % HUNDRED_MB, 1)
    raw.send_until_refused(b"x" * 65536, HUNDRED_MB)
    assert raw.reply().error == "body_too_large"


@pytest.mark.parametrize(
    "flood",
    [
        "".join(f"x-{number}: y\r\n" for number in range(65)) + "\r\n",
        "x: " + "y" * 16_400 + "\r\n\r\n",
        "x" * 16_400 + ": y\r\n\r\n",
        "".join(f"x-{number}: {'y' * 400}\r\n" for number in range(45)) + "\r\n",
    ],
    ids=["number", "value", "name", "sum"],
)
def test_too_many_and_too_large_headers_are_refused(raw: Raw, flood: str) -> None:
    reply = raw.send("GET /healthz HTTP/1.1\r\nhost: miner\r\n", flood).last_reply()
    assert (reply.status, reply.error) == (431, "headers_too_large")


def test_a_long_address_counts_as_a_header(raw: Raw) -> None:
    assert raw.send(request("/" + "x" * 16_400)).last_reply().error == "headers_too_large"


@pytest.mark.parametrize("endless", ["x-more: y\r\n", "y" * 100], ids=["headers", "one header"])
def test_headers_without_an_end_are_refused_at_the_limit(raw: Raw, endless: str) -> None:
    raw.send("GET /healthz HTTP/1.1\r\nx: ")
    sent = raw.send_until_refused(endless.encode() * 100, 50 * 1024**2)
    assert sent < 10 * 1024**2
    assert raw.reply().error == "headers_too_large"


def test_connections_beyond_the_limit_are_told_so(tmp_path: Path) -> None:
    # None of the first is given up before the last is there.
    with (
        live(tmp_path / "daemon", {**SHORT, "HEADER_TIMEOUT_SECONDS": "300"}) as daemon,
        ExitStack() as stack,
    ):
        connections = [stack.enter_context(daemon.raw()) for _ in range(60)]
        ends = time.monotonic() + PATIENCE
        while len(refused := [raw for raw in connections if not raw.silent(0.001)]) < 20:
            assert time.monotonic() < ends
        assert [raw.last_reply().error for raw in refused] == ["busy"] * 20


# Sense


@pytest.mark.parametrize("name", AUTH_HEADERS)
def test_a_header_given_twice_is_refused(daemon: Live, raw: Raw, name: str) -> None:
    whole = daemon.offer("twice")[1]
    line = next(line for line in whole.split(b"\r\n") if line.startswith(name.encode()))
    reply = raw.send(whole.replace(line, line + b"\r\n" + line.upper())).reply()
    assert (reply.status, reply.error) == (400, "header_invalid")
    assert name in reply.json()["message"]


@pytest.mark.parametrize("name", AUTH_HEADERS)
def test_a_header_that_is_not_ascii_is_refused(daemon: Live, raw: Raw, name: str) -> None:
    whole = daemon.offer("ascii")[1]
    line = next(line for line in whole.split(b"\r\n") if line.startswith(name.encode()))
    reply = raw.send(whole.replace(line, line[:-1] + "é".encode())).reply()
    assert (reply.status, reply.error) == (400, "header_invalid")


def test_headers_that_are_not_ours_may_hold_what_they_like(daemon: Live, raw: Raw) -> None:
    assert raw.send(request("/healthz", {"x": "é\xff", "cookie": "a=b"})).reply().status == 200


def test_a_body_cut_short_and_signed_as_such_is_no_json(daemon: Live) -> None:
    reply = daemon.ask(daemon.post("/task_offer/", b'{"model": "a/b", "task_id": "t'))
    assert (reply.status, reply.error) == (422, "invalid_request")
    assert reply.json()["fields"][0]["field"] == "body"


NOT_HTTP = {
    "tls": bytes.fromhex("16030100f8010000f403") + bytes(range(200)),
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "zeros": bytes(1000),
    "noise": Random(1).randbytes(1000),
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http/9.9": b"GET /healthz HTTP/9.9\r\n\r\n",
    "redis": b"*1\r\n$4\r\nPING\r\n",
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


@pytest.mark.parametrize("name", NOT_HTTP)
def test_what_is_not_http_gets_a_400_and_is_hung_up_on(raw: Raw, name: str) -> None:
    reply = raw.send(NOT_HTTP[name]).last_reply()
    assert (reply.status, reply.error) == (400, "not_http")
    assert reply.closes


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("HEAD", "/healthz", 405),
        ("HEAD", "/task_offer/", 405),
        ("OPTIONS", "/task_offer/", 405),
        ("OPTIONS", "/", 404),
        ("PUT", "/task_offer/", 405),
        ("DELETE", "/training_repo/text", 405),
        ("TRACE", "/healthz", 405),
        ("PURGE", "/task_offer/", 405),
        ("POST", "/get_latest_model_submission/x", 405),
    ],
)
def test_other_methods_are_refused(raw: Raw, method: str, target: str, status: int) -> None:
    reply = raw.send(request(target, method=method)).reply(to_head=method == "HEAD")
    assert reply.status == status
    assert reply.headers["content-type"] == "application/json"
    if status == 405:
        assert reply.headers["allow"] in ("GET", "POST")
    assert raw.send(request("/healthz")).reply().status == 200


def test_a_method_nobody_knows_is_not_http(raw: Raw) -> None:
    assert raw.send(request("/healthz", method="BREW")).last_reply().error == "not_http"


# Ways to speak


def test_http_1_0_is_answered_and_hung_up_on(raw: Raw) -> None:
    reply = raw.send(request("/healthz", {"connection": "keep-alive"}, version="HTTP/1.0")).last_reply()
    assert reply.json()["status"] == "ok"
    assert reply.closes


def test_even_http_0_9_gets_json(raw: Raw) -> None:
    assert raw.send(b"GET /healthz\r\n\r\n").last_reply().json()["status"] == "ok"


def test_who_wants_to_close_is_closed(raw: Raw) -> None:
    assert raw.send(request("/healthz", {"connection": "close"})).last_reply().status == 200


@pytest.mark.parametrize(("upgrade"), ["h2c", "websocket"])
def test_an_upgrade_is_not_offered(raw: Raw, upgrade: str) -> None:
    headers = {"connection": "upgrade", "upgrade": upgrade, "sec-websocket-key": "x" * 22 + "=="}
    assert raw.send(request("/healthz", headers)).last_reply().status == 200


def test_a_whole_address_in_the_first_line_is_understood(raw: Raw) -> None:
    assert raw.send(request("http://miner/healthz?x=1")).reply().status == 200


def test_one_connection_serves_many_requests(raw: Raw) -> None:
    for _ in range(200):
        assert raw.send(request("/healthz")).reply().status == 200


def test_refused_requests_leave_the_connection_usable(daemon: Live, raw: Raw) -> None:
    for path in ("/nowhere", "/task_offer/", "/get_latest_model_submission/x"):
        assert raw.send(request(path)).reply().status in (404, 405, 422)
    assert raw.send(request("/healthz")).reply().status == 200


def test_a_client_that_hangs_up_in_the_middle_of_its_body_leaves_nothing(daemon: Live) -> None:
    whole = daemon.offer("gone")[1]
    head = whole.partition(b"content-length")[0] + b"transfer-encoding: chunked\r\n\r\n"
    with daemon.raw() as gone:
        gone.send(head, chunk(b"{"))
    for cut in (-1, -50, len(whole) // 2):
        with daemon.raw() as gone:
            gone.send(whole[:cut])
        with daemon.raw() as rude:
            rude.send(whole[:cut]).reset()


def test_clients_that_hang_up_before_their_reply_harm_nobody(daemon: Live) -> None:
    for _ in range(50):
        with daemon.raw() as gone:
            gone.send(request("/healthz") * 20).reset()


def test_garbage_in_pieces_of_any_size_gets_one_whole_refusal_or_none(daemon: Live) -> None:
    random = Random(2)
    for _ in range(40):
        garbage = random.choice(list(NOT_HTTP.values()))
        with daemon.raw() as raw:
            for start in range(0, len(garbage), step := random.randint(1, 200)):
                raw.send_until_refused(garbage[start : start + step], 1)
            assert raw.end().last_reply().error == "not_http"


def test_json_comes_back_whatever_was_sent(daemon: Live) -> None:
    """Mutations of a good request: each gets whole JSON replies, or the connection is closed."""
    random = Random(3)
    good = request("/healthz") + request("/task_offer/", body=b'{"a": 1}')
    for _ in range(150):
        sent = bytearray(good)
        for _ in range(random.randint(1, 4)):
            sent[random.randrange(len(sent))] = random.randrange(256)
        with daemon.raw() as raw:
            raw.send(bytes(sent)).end()
            while not raw.at_end():
                reply = raw.reply()
                assert 200 <= reply.status < 500
                json.loads(reply.body)
