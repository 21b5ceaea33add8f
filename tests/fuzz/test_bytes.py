"""Bodies and headers that no schema describes."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from core.domain.tasks import OFFERED_TASKS, TaskType
from miner.chain.fiber import AUTH_HEADERS
from miner.dev.samples import sample_task
from miner.http.subnet import ROUTES
from tests.doubles.http_bytes import Reply, request
from tests.miner.http.daemon_process import DaemonProcess
from tests.miner.http.raw_connection import RawConnection

POSTS = [path for method, path, _ in ROUTES if method == "POST"]
PATHS = [*POSTS, "/get_latest_model_submission/x", "/training_repo/text", "/healthz"]

many = settings(max_examples=2 * settings.default.max_examples, suppress_health_check=list(HealthCheck))

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def check(reply: Reply) -> None:
    assert 200 <= reply.status < 500, reply
    answer = reply.json
    if reply.status != 200:
        assert answer["error"]
        assert answer["message"]


def exchange(target: DaemonProcess, *parts: bytes) -> None:
    """Send all on one connection, and check every reply until the other side closes it."""
    with RawConnection(target.port) as raw:
        raw.send(*parts).end()
        while not raw.at_end():
            check(raw.reply())


def unchanged(target: DaemonProcess, *parts: bytes) -> Reply:
    before = target.counts()
    reply = target.ask(*parts)
    check(reply)
    if reply.status != 200:
        assert target.counts() == before
    return reply


@many
@given(st.sampled_from(POSTS), st.binary(max_size=200))
def test_any_signed_bytes(target: DaemonProcess, path: str, body: bytes) -> None:
    assert unchanged(target, target.post(path, body)).status == 422


@many
@given(st.sampled_from(OFFERED_TASKS), st.booleans(), st.data())
@example(TaskType.INSTRUCT, True, None)
def test_a_good_request_with_one_field_gone_wild(
    target: DaemonProcess, kind: TaskType, starts: bool, data: st.DataObject | None
) -> None:
    task = sample_task(kind, Random(0))
    payload: dict[str, Any] = task.start() if starts else task.offer()
    if data is not None:
        place = payload
        if isinstance(inner := payload.get("dataset_type"), dict) and data.draw(st.booleans()):
            payload["dataset_type"] = place = dict(inner)
        place[data.draw(st.sampled_from(sorted(place)) | st.text(max_size=8))] = data.draw(anything)
    body = json.dumps(payload).encode("utf-8", "surrogatepass")
    assert unchanged(target, target.post(task.start_path if starts else task.offer_path, body)).status in (
        200,
        422,
    )


@many
@given(
    st.sampled_from(PATHS),
    st.dictionaries(st.sampled_from(AUTH_HEADERS), st.text(st.characters(max_codepoint=255), max_size=140)),
)
def test_any_headers(target: DaemonProcess, path: str, spoilt: dict[str, str]) -> None:
    body = b"{}" if path in POSTS else b""
    exchange(target, request(path, {**target.headers(body or None), **spoilt}, body))


@many
@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=60))
@example("*")
@example("//")
@example("http://")
@example("/%")
@example("/%ff")
@example("/training_repo/%ff")
@example("/get_latest_model_submission/%0a")
@example("/task_offer%2F")
def test_any_target(target: DaemonProcess, path: str) -> None:
    exchange(target, request(path, target.headers(None)))


@many
@given(st.lists(st.binary(max_size=60) | st.sampled_from([b"\r\n", b"GET / HTTP/1.1\r\n", b"\r\n\r\n"])))
def test_any_bytes(target: DaemonProcess, parts: list[bytes]) -> None:
    exchange(target, *parts)


@many
@given(st.data())
def test_a_good_request_with_bytes_changed_put_in_or_taken_out(
    target: DaemonProcess, data: st.DataObject
) -> None:
    whole = bytearray(target.offer("mutated")[1] + target.get("/training_repo/text"))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(whole) - 1))
        whole[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        exchange(target, bytes(whole))
    except TimeoutError as error:
        raise AssertionError(bytes(whole)) from error
