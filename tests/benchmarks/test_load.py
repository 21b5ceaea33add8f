import json
import math
import threading
from ipaddress import ip_address
from pathlib import Path

import pytest
from bittensor_core import Keypair

from benchmarks import load
from benchmarks.load import LoadPlan, LoadRefused, LoadReport, loopback_address, run_load
from benchmarks.presign import LoadKind
from miner.dev.stack import free_ports
from tests.doubles.each import each
from tests.miner.dev.serving import Handler, serving

VALIDATOR = Keypair.from_seed(b"v" * 32)
MINER = Keypair.from_seed(b"m" * 32).ss58_address


def run(plan: LoadPlan) -> LoadReport:
    return run_load(plan, VALIDATOR, MINER)


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

    with serving(answer) as server:
        report = run(LoadPlan(server.url, concurrency=3, requests=40))
    assert report.answered == 40
    assert most <= 3


def test_more_requests_than_a_batch_are_signed_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "BATCH", 10)
    with serving() as server:
        report = run(LoadPlan(server.url, LoadKind.HEALTH, concurrency=2, requests=25))
    assert (report.answered, report.errors, report.unsent) == (25, 0, 0)


def test_an_unexpected_status_is_an_error_and_still_has_a_latency() -> None:
    def answer(handler: Handler) -> None:
        handler.reply(503 if handler.count % 2 else 200)

    with serving(answer) as server:
        report = run(LoadPlan(server.url, concurrency=1, requests=10))
    assert report.statuses == {200: 5, 503: 5}
    assert report.errors == 5
    assert len(report.latencies_s) == 10


def test_refusals_are_what_garbage_should_get() -> None:
    with serving(lambda handler: handler.reply(401)) as server:
        assert run(LoadPlan(server.url, LoadKind.GARBAGE, requests=10)).errors == 0
    with serving() as server:
        assert run(LoadPlan(server.url, LoadKind.GARBAGE, requests=10)).errors == 10


def test_a_connection_that_the_server_closes_after_its_reply_is_opened_anew() -> None:
    with serving(lambda handler: handler.reply(connection="close")) as server:
        report = run(LoadPlan(server.url, concurrency=2, requests=12))
    assert (report.answered, report.errors) == (12, 0)


def test_a_connection_lost_in_the_middle_of_a_reply_is_one_failure() -> None:
    def answer(handler: Handler) -> None:
        if handler.count == 3:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
            handler.close_connection = True
        else:
            handler.reply()

    with serving(answer) as server:
        report = run(LoadPlan(server.url, concurrency=1, requests=10))
    assert report.failures == {"connection lost": 1}
    assert report.statuses == {200: 9}
    assert report.errors == 1


def test_what_is_no_http_is_one_failure_each() -> None:
    def answer(handler: Handler) -> None:
        handler.wfile.write(b"hello\r\n\r\n")

    with serving(answer) as server:
        report = run(LoadPlan(server.url, concurrency=1, requests=3))
    assert report.failures == {"not HTTP": 3}


def test_an_interim_reply_is_not_taken_for_the_answer() -> None:
    def answer(handler: Handler) -> None:
        handler.wfile.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        handler.reply(201)

    with serving(answer) as server:
        assert run(LoadPlan(server.url, requests=4, concurrency=1)).statuses == {201: 4}


def test_an_answer_in_chunks_or_in_pieces_is_one_answer() -> None:
    def answer(handler: Handler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n")
        handler.wfile.flush()
        handler.wfile.write(b"0\r\n\r\n")

    with serving(answer) as server:
        report = run(LoadPlan(server.url, requests=6, concurrency=2))
    assert (report.statuses, report.errors) == ({200: 6}, 0)


def test_a_request_without_an_answer_in_time_fails_alone() -> None:
    def answer(handler: Handler) -> None:
        if handler.count != 2:
            handler.reply()
        else:
            handler.rfile.read(1)  # until the other side gives up

    with serving(answer) as server:
        report = run(LoadPlan(server.url, requests=6, concurrency=2, timeout_s=3.0))
    assert report.failures == {"no answer in time": 1}
    assert report.statuses == {200: 5}


def test_the_whole_run_ends_at_its_limit_and_says_what_is_left() -> None:
    def answer(handler: Handler) -> None:
        handler.rfile.read(1)

    with serving(answer) as server:
        report = run(LoadPlan(server.url, requests=10, concurrency=2, seconds=2.0))
    assert report.failures == {"cut off by the run's limit": 2}
    assert report.unsent == 8


def test_nobody_listening_is_a_failure_per_request_and_no_crash() -> None:
    (port,) = free_ports(1)
    report = run(LoadPlan(f"http://127.0.0.1:{port}", requests=5, concurrency=2))
    assert report.failures == {"not connected": 5}
    assert math.isnan(report.percentile_ms(0.5))
    assert report.as_json()["latency_ms"]["p99"] is None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:7999", 7999),
        ("http://127.1.2.3:80/", 80),
        ("http://[::1]:7999", 7999),
        ("http://localhost:7999", 7999),
    ],
)
def test_loopback_in_any_spelling_may_be_loaded(url: str, expected: int) -> None:
    host, port = loopback_address(url)
    assert ip_address(host).is_loopback
    assert port == expected


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
        {"requests": 0},
        {"requests": 10**7},
        {"concurrency": 0},
        {"concurrency": 5000},
        {"seconds": math.inf},
        {"seconds": math.nan},
        {"timeout_s": 0},
    ],
)
def test_a_run_is_bounded_in_count_width_and_time(wrong: dict[str, float]) -> None:
    with pytest.raises(LoadRefused, match="out of bounds"):
        LoadPlan("http://127.0.0.1:7999", **wrong)  # type: ignore[arg-type]


def test_percentiles_are_latencies_that_were_seen() -> None:
    report = LoadReport(LoadPlan("http://127.0.0.1:1"))
    report.latencies_s.extend(number / 1000 for number in range(100, 0, -1))
    seen = [report.percentile_ms(share) for share in (0.5, 0.9, 0.99, 1.0)]
    assert seen == pytest.approx([50, 90, 99, 100])


def test_the_program_prints_a_table_or_json_and_its_exit_code_tells_of_errors(
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
