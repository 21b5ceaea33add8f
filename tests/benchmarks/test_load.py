import json
import math
import socket
import threading
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from bittensor_core import Keypair

from benchmarks import load
from benchmarks.load import LoadPlan, LoadRefused, LoadReport, loopback_address, run_load
from benchmarks.load_kind import LoadKind
from tests.doubles.each import each
from tests.miner.dev.serving import Answer, Handler, serving

pytestmark = pytest.mark.process


VALIDATOR = Keypair.from_seed(b"v" * 32)
MINER = Keypair.from_seed(b"m" * 32).ss58_address


def run(plan: LoadPlan) -> LoadReport:
    return run_load(plan, VALIDATOR, MINER)


def under_load(answer: Answer = Handler.reply, **plan: Any) -> LoadReport:
    with serving(answer) as server:
        return run(LoadPlan(server.url, **{"concurrency": 1, **plan}))


def test_every_request_is_sent_once_and_every_answer_counted() -> None:
    with serving() as server:
        report = run(LoadPlan(server.url, concurrency=4, requests=60))
    assert server.seen == ["POST /task_offer/"] * 60
    assert report.statuses == {200: 60}
    assert (report.answered, report.errors, report.unsent) == (60, 0, 0)
    assert len(report.latencies_s) == 60
    assert 0 < report.percentile_ms(0.5) <= report.percentile_ms(0.99) <= report.percentile_ms(1.0)
    assert report.percentile_ms(1.0) <= report.seconds * 1000
    assert report.per_second == pytest.approx(60 / report.seconds)


def test_no_more_than_the_asked_concurrency_is_under_way() -> None:
    lock, now, most = threading.Lock(), 0, 0

    def answer(handler: Handler) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        handler.reply()
        with lock:
            now -= 1

    assert under_load(answer, concurrency=3, requests=40).answered == 40
    assert most <= 3


def test_more_requests_than_a_batch_are_signed_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "BATCH", 10)
    report = under_load(kind=LoadKind.HEALTH, concurrency=2, requests=25)
    assert (report.answered, report.errors, report.unsent) == (25, 0, 0)


def test_an_unexpected_status_is_an_error_and_still_has_a_latency() -> None:
    report = under_load(lambda handler: handler.reply(503 if handler.count % 2 else 200), requests=10)
    assert report.statuses == {200: 5, 503: 5}
    assert report.errors == 5
    assert len(report.latencies_s) == 10


@pytest.mark.parametrize(("status", "errors"), [(401, 0), (200, 10)])
def test_refusals_are_what_garbage_should_get(status: int, errors: int) -> None:
    report = under_load(lambda handler: handler.reply(status), kind=LoadKind.GARBAGE, requests=10)
    assert report.errors == errors


def cut_short(handler: Handler) -> None:
    if handler.count == 3:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
        handler.close_connection = True
    else:
        handler.reply()


def no_http(handler: Handler) -> None:
    handler.wfile.write(b"hello\r\n\r\n")


def interim(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 102 Processing\r\n\r\n")
    handler.reply(201)


def in_chunks(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n")
    handler.wfile.flush()
    handler.wfile.write(b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "statuses", "failures"),
    [
        (lambda handler: handler.reply(connection="close"), {200: 6}, {}),
        (cut_short, {200: 5}, {"connection lost": 1}),
        (no_http, {}, {"not HTTP": 6}),
        (interim, {201: 6}, {}),
        (in_chunks, {200: 6}, {}),
    ],
    ids=["closed after each reply", "lost in a reply", "not HTTP", "interim reply", "in chunks"],
)
def test_each_request_has_one_answer_or_one_failure(
    answer: Answer, statuses: dict[int, int], failures: dict[str, int]
) -> None:
    report = under_load(answer, requests=6)
    assert (report.statuses, report.failures) == (statuses, failures)


def test_a_request_without_an_answer_in_time_fails_and_the_next_goes_on() -> None:
    def answer(handler: Handler) -> None:
        if handler.count != 2:
            handler.reply()
        else:
            handler.rfile.read(1)  # until the other side gives up

    report = under_load(answer, requests=6, timeout_s=3.0)
    # Others are late as well where the machine stands still for seconds.
    assert report.failures.keys() == {"no answer in time"}
    assert report.statuses.keys() == {200}
    assert (report.unsent, len(report.latencies_s)) == (0, report.answered)


def test_the_whole_run_ends_at_its_limit_and_says_what_is_left() -> None:
    report = under_load(lambda handler: handler.rfile.read(1), requests=10, concurrency=2, seconds=2.0)
    assert report.answered == 0
    # Fewer than two where the limit comes before a connection.
    assert report.failures.keys() <= {"cut off by the run's limit"}
    assert report.unsent >= 8


def test_nobody_listening_is_a_failure_per_request_and_no_crash() -> None:
    with socket.socket() as bound:  # and nobody accepts what comes to this port
        bound.bind(("127.0.0.1", 0))
        report = run(LoadPlan(f"http://127.0.0.1:{bound.getsockname()[1]}", requests=5, concurrency=2))
    assert report.failures == {"not connected": 5}
    assert math.isnan(report.percentile_ms(0.5))
    assert report.as_json()["latency_ms"]["p99"] is None


@pytest.mark.parametrize(
    ("url", "port"),
    [
        *(("http://127.0.0.1:7999", 7999), ("http://127.1.2.3:80/", 80)),
        *(("http://[::1]:7999", 7999), ("http://localhost:7999", 7999)),
    ],
)
def test_loopback_in_any_spelling_may_be_loaded(url: str, port: int) -> None:
    host, found_port = loopback_address(url)
    assert ip_address(host).is_loopback
    assert found_port == port


@each(
    "url",
    [
        "http://10.0.0.1:7999",
        "http://0.0.0.0:7999",
        "http://192.168.1.2",
        "http://example.com",
        "http://localhost.example.com",
        "http://127.0.0.1.example.com",
        "http://127.0.0.1@example.com",
        "https://127.0.0.1:7999",
        "127.0.0.1:7999",
        "http://127.0.0.1:99999",
        "http://[::1",
        "http://127.0.0.1/task_offer/",
        "http://127.0.0.1?x=1",
        "http://",
        "",
    ],
)
def test_nothing_but_loopback_may_be_loaded(url: str) -> None:
    with pytest.raises(LoadRefused):
        LoadPlan(url)


@each(
    "wrong",
    [
        *({"requests": 0}, {"requests": 10**7}, {"concurrency": 0}, {"concurrency": 5000}),
        *({"seconds": math.inf}, {"seconds": math.nan}, {"timeout_s": 0}),
    ],
)
def test_a_run_is_bounded_in_count_width_and_time(wrong: dict[str, float]) -> None:
    with pytest.raises(LoadRefused, match="out of bounds"):
        LoadPlan("http://127.0.0.1:7999", **wrong)  # type: ignore[arg-type]


def test_percentiles_are_latencies_that_were_seen() -> None:
    report = LoadReport(LoadPlan("http://127.0.0.1:1"))
    report.latencies_s.extend(number / 1000 for number in range(100, 0, -1))
    assert [report.percentile_ms(share) for share in (0.5, 0.9, 0.99, 1.0)] == pytest.approx(
        [50, 90, 99, 100]
    )


def test_the_program_prints_a_table_or_json_and_its_exit_code_shows_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as server:
        common = ["--url", server.url, "--requests", "20", "--concurrency", "4", "--dir", str(tmp_path)]
        assert load.main(common) == 0
        assert "20 of 20 offer requests answered" in capsys.readouterr().out
        assert load.main([*common, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["statuses"] == {"200": 20}
    with serving(lambda handler: handler.reply(500)) as server:
        assert load.main(["--url", server.url, "--requests", "5", "--json", "--dir", str(tmp_path)]) == 1
    assert json.loads(capsys.readouterr().out)["errors"] == 5
    with pytest.raises(SystemExit):
        load.main(["--url", "http://192.0.2.1:7999", "--dir", str(tmp_path)])
    assert "not loopback" in capsys.readouterr().err
