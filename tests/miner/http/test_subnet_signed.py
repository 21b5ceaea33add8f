"""Signed requests over real connections: however they arrive, each counts once, also across a restart."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from core.domain.tasks import TaskType
from miner.dev.samples import sample_task
from tests.doubles.http_bytes import chunk, request
from tests.miner.http.daemon_process import DaemonProcess, run_daemon_process
from tests.miner.http.raw_connection import RawConnection

pytestmark = pytest.mark.process

OPEN = {"MAX_JOBS": "10000", "miner.chain.auth.FAILURE_BURST": "100000"}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with run_daemon_process(tmp_path_factory.mktemp("daemon"), OPEN) as process:
        yield process
    assert process.logged("WARNING", "ERROR", "CRITICAL") == []


@pytest.fixture
def raw(daemon: DaemonProcess) -> Iterator[RawConnection]:
    with daemon.connect() as connection:
        yield connection


def is_stored(daemon: DaemonProcess, task_id: str) -> bool:
    return bool(daemon.rows("SELECT 1 FROM offers WHERE task_id = ?", task_id))


@pytest.mark.parametrize(("kind", "call"), [(TaskType.INSTRUCT, "offer"), (TaskType.IMAGE, "start")])
def test_of_twenty_identical_requests_at_once_one_wins(
    daemon: DaemonProcess, kind: TaskType, call: str
) -> None:
    task = sample_task(kind, Random(call + kind))
    path = task.offer_path if call == "offer" else task.start_path
    whole = daemon.post(path, json.dumps(getattr(task, call)()).encode())
    ready = threading.Barrier(20)

    def send(_: int) -> int:
        with daemon.connect() as raw:
            raw.send(whole[:-1])
            ready.wait()
            return raw.send(whole[-1:]).reply().status

    with ThreadPoolExecutor(20) as pool:
        assert Counter(pool.map(send, range(20))) == {200: 1, 401: 19}
    if call == "offer":
        (kept,) = daemon.rows("SELECT times_seen AS n FROM offers WHERE task_id = ?", task.task_id)
    else:
        (kept,) = daemon.rows("SELECT starts AS n FROM jobs WHERE task_id = ?", task.task_id)
    assert kept["n"] == 1


def test_the_same_signature_wins_once_also_on_one_connection(
    daemon: DaemonProcess, raw: RawConnection
) -> None:
    _, whole = daemon.offer("pipelined twins")
    raw.send(whole * 20)
    assert [raw.reply().status for _ in range(20)] == [200] + [401] * 19


@pytest.mark.kept("9")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_was_answered_before_a_restart_cannot_be_replayed(
    tmp_path_factory: pytest.TempPathFactory, number: signal.Signals
) -> None:
    folder = tmp_path_factory.mktemp("restart")
    with run_daemon_process(folder, OPEN) as before:
        _, good = before.offer("good")
        bad = before.post("/task_offer/", b'{"no": "offer"}')
        get = before.get("/training_repo/text")
        assert [before.ask(whole).status for whole in (good, bad, get)] == [200, 422, 404]
        os.kill(before.child.pid, number)
        before.child.stop()
        before.child.start()
        again = [before.ask(whole) for whole in (good, bad, get)]
        assert [(reply.status, reply.error) for reply in again] == [(401, "bad_credentials")] * 3
        assert before.rows("SELECT times_seen FROM offers") == [{"times_seen": 1}]


def test_a_request_in_pieces_of_any_size_is_the_same_request(daemon: DaemonProcess) -> None:
    random = Random(5)
    for number in range(15):
        task, whole = daemon.offer(f"pieces {number}")
        cuts = sorted(random.choices(range(len(whole)), k=random.randint(0, 12)))
        with daemon.connect() as raw:
            for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
                raw.send(whole[start:end])
            assert raw.reply().json["accepted"] is True
        assert is_stored(daemon, task.task_id)


def test_a_chunked_body_is_signed_like_any_other(daemon: DaemonProcess, raw: RawConnection) -> None:
    task, whole = daemon.offer("chunked")
    head, _, body = whole.partition(b"\r\n\r\n")
    head = head.replace(b"content-length: %d" % len(body), b"transfer-encoding: chunked")
    pieces = b"".join(chunk(body[start : start + 7]) for start in range(0, len(body), 7))
    assert raw.send(head, b"\r\n\r\n", pieces, b"0\r\n\r\n").reply().status == 200
    assert is_stored(daemon, task.task_id)


def test_a_client_that_expects_100_continue_gets_it(daemon: DaemonProcess, raw: RawConnection) -> None:
    body = json.dumps(sample_task(TaskType.DPO, Random("expect")).offer()).encode()
    head, _, body = daemon.post("/task_offer/", body, expect="100-continue").partition(b"\r\n\r\n")
    assert raw.send(head, b"\r\n\r\n").reply().status == 100
    assert raw.send(body).reply().json["accepted"] is True


def test_a_stranger_that_expects_100_continue_is_refused(raw: RawConnection) -> None:
    raw.send("POST /task_offer/ HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 10\r\n\r\n")
    assert raw.reply().error == "header_missing"


def test_signatures_in_trailers_are_none(daemon: DaemonProcess, raw: RawConnection) -> None:
    body = json.dumps(sample_task(TaskType.DPO, Random("trailers")).offer()).encode()
    trailers = "".join(f"{name}: {value}\r\n" for name, value in daemon.headers(body).items())
    head = "POST /task_offer/ HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
    # In one piece, so that they are here before anybody looks at the headers.
    assert raw.send(head, chunk(body), "0\r\n", trailers, "\r\n").reply().error == "header_missing"


def test_many_connections_each_get_their_own_answers(daemon: DaemonProcess) -> None:
    def send(number: int) -> None:
        tasks = [sample_task(TaskType.INSTRUCT, Random(f"many {number} {turn}")) for turn in range(10)]
        requests = [daemon.post(task.start_path, json.dumps(task.start()).encode()) for task in tasks]
        with daemon.connect() as raw:
            raw.send(*requests)
            for task in tasks:
                assert raw.reply().json == {"message": "Training is queued.", "task_id": task.task_id}

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(send, range(20)))


def test_an_offer_whose_sender_hung_up_is_kept_or_not_but_never_half(daemon: DaemonProcess) -> None:
    for number in range(12):
        _, whole = daemon.offer(f"rude {number}")
        with daemon.connect() as raw:
            raw.send(whole).reset()
    assert daemon.is_alive()
    assert (
        daemon.rows(
            "SELECT 1 FROM offers LEFT JOIN decisions ON decisions.id = offers.decision_id "
            "WHERE decisions.id IS NULL"
        )
        == []
    )


def test_a_get_is_answered_whatever_body_comes_with_it(daemon: DaemonProcess, raw: RawConnection) -> None:
    head = daemon.get("/training_repo/text").removesuffix(b"\r\n")
    assert raw.send(head, b"content-length: 5\r\n\r\nhello").reply().error == "not_entered"
    assert raw.send(request("/healthz")).reply().status == 200
