"""The express lane keeps its place among the requests of a connection, and is one as far as anybody sees."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from miner.api.express import MAX_EXPRESS_BODY
from tests.miner.api.bench import Bench, bench
from tests.miner.api.raw import Raw, request


@pytest.fixture(scope="module")
def server() -> Iterator[Bench]:
    with bench() as made:
        yield made


@pytest.fixture
def raw(server: Bench) -> Iterator[Raw]:
    with Raw(server.port) as made:
        yield made


def lane(name: str, *, wait: bool = False, **headers: str) -> bytes:
    return request("/lane/wait" if wait else "/lane/now", headers, name.encode())


def begun(server: Bench, path: str) -> None:
    server.wait_until(lambda: path in server.begun)


def test_a_small_post_takes_the_lane_and_a_request_behind_it_waits(server: Bench, raw: Raw) -> None:
    raw.send(lane("first", wait=True), lane("second"), request("/now/third"), lane("fourth"))
    begun(server, "/lane/wait/first")
    assert "/now/third" not in server.begun
    server.let_go("/lane/wait/first")
    # Whatever does not find the lane free goes the normal road, where the test's application answers.
    paths = [raw.reply().json()["path"] for _ in range(4)]
    assert paths == ["/lane/wait/first", "/lane/now", "/now/third", "/lane/now"]
    assert raw.send(lane("fifth")).reply().json() == {"path": "/lane/now/fifth"}


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"transfer-encoding": "chunked"}, b"1\r\nx\r\n0\r\n\r\n"),
        ({"expect": "100-continue", "content-length": "1"}, b"x"),
        ({"connection": "close", "content-length": "1"}, b"x"),
        ({"content-length": "0"}, b""),
        ({"content-length": "9000"}, b"x" * 9000),
    ],
    ids=["chunked", "expecting", "closing", "empty", "large"],
)
def test_what_is_out_of_the_ordinary_takes_the_normal_road(
    raw: Raw, headers: dict[str, str], body: bytes
) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    reply = raw.send(f"POST /lane/now HTTP/1.1\r\n{lines}\r\n", body).reply()
    while reply.status == 100:
        reply = raw.reply()
    expected = "/lane/now/" + "x" * 9000 if len(body) == 9000 <= MAX_EXPRESS_BODY else "/lane/now"
    assert reply.json() == {"path": expected}


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_only_a_plain_post_is_on_the_lane(raw: Raw, method: str, version: str) -> None:
    reply = raw.send(request("/lane/now", body=b"x", method=method, version=version)).reply()
    assert reply.json()["path"] == (
        "/lane/now/x" if (method, version) == ("POST", "HTTP/1.1") else "/lane/now"
    )


def test_what_is_refused_waits_for_the_answer_on_the_lane(server: Bench, raw: Raw) -> None:
    raw.send(lane("before", wait=True), "no http at all\r\n\r\n")
    begun(server, "/lane/wait/before")
    server.wait_until(lambda: 400 in server.refused)
    server.let_go("/lane/wait/before")
    assert raw.reply().json() == {"path": "/lane/wait/before"}
    assert raw.last_reply().error == "not_http"


def test_a_body_that_does_not_come_is_not_waited_for(server: Bench, raw: Raw) -> None:
    raw.send(lane("whole")[:-1])
    assert raw.last_reply().error == "body_too_slow"
    assert "/lane/now/whole" not in server.begun


def test_half_a_body_and_no_more_is_no_request(server: Bench, raw: Raw) -> None:
    assert raw.send(lane("parted")[:-1]).end().closed()
    assert not [path for path in server.begun if "parte" in path]


def test_a_half_closed_connection_still_gets_its_answer(server: Bench, raw: Raw) -> None:
    raw.send(lane("half", wait=True)).end()
    begun(server, "/lane/wait/half")
    server.let_go("/lane/wait/half")
    reply = raw.last_reply()
    assert reply.json() == {"path": "/lane/wait/half"}
    assert reply.closes


def test_a_client_that_hangs_up_harms_nobody(server: Bench, raw: Raw) -> None:
    raw.send(lane("gone", wait=True))
    begun(server, "/lane/wait/gone")
    raw.reset()
    server.let_go("/lane/wait/gone")
    with Raw(server.port) as other:
        assert other.send(lane("other")).reply().status == 200


def test_an_idle_connection_is_closed_after_a_while(raw: Raw) -> None:
    assert raw.send(lane("idle")).reply().status == 200
    assert raw.closed()


def test_the_lane_is_emptied_before_the_server_stops() -> None:
    with bench() as server, Raw(server.port) as raw:
        raw.send(lane("last", wait=True), request("/now/last"))
        begun(server, "/lane/wait/last")
        server.server.should_exit = True
        server.let_go("/lane/wait/last")
        assert raw.reply().json() == {"path": "/lane/wait/last"}
        assert raw.last_reply().json() == {"path": "/now/last"}
