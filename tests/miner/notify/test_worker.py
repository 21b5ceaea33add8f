"""Real Apprise in its own process, and targets on loopback that take, refuse, hang or are not there."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from miner.alerts.rules import load_alert_rules
from miner.api.alerts import Severity
from miner.notify.messages import NotifyMessage
from miner.notify.targets import NotifyTargets
from miner.observe.alerts import HOST, AlertKind
from miner.store.alerts import NewAlert, newest_alerts, record_alert
from tests.miner.http.daemon_in_process import DaemonInProcess, open_daemon

pytestmark = pytest.mark.process


SECRET = "s3cr3t-path-of-a-webhook"
LIMIT_SECONDS = 60.0
MESSAGE = NotifyMessage(title="a title", body="first <line>\nsecond", type="warning")


class HttpSink:
    """A webhook on loopback. A path with "refuse" is answered by 500, one with "hang" not before the end."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.hanging = threading.Event()
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if "hang" in self.path:
                    sink.hanging.wait(LIMIT_SECONDS)
                if "refuse" not in self.path:
                    sink.messages.append(json.loads(body))
                self.send_response(500 if "refuse" in self.path else 200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def url(self, path: str = "") -> str:
        return f"json://127.0.0.1:{self._server.server_port}/{path}"

    @property
    def text(self) -> str:
        return "\n".join(f"{message['title']}\n{message['message']}" for message in self.messages)

    def close(self) -> None:
        self.hanging.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def sink() -> Iterator[HttpSink]:
    opened = HttpSink()
    yield opened
    opened.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while not holds():
            await asyncio.sleep(0.05)


async def test_each_target_says_for_itself_whether_a_message_arrived(sink: HttpSink) -> None:
    urls = (
        sink.url("take"),
        sink.url(f"refuse/{SECRET}"),
        "json://127.0.0.1:1/",
        f"nosuch://{SECRET}",
    )
    targets = NotifyTargets(urls, lambda text: text)
    results = await targets.deliver({number: [MESSAGE] for number in range(len(urls))})
    assert [results[number].delivered for number in range(4)] == [1, 0, 0, 0]
    errors = [results[number].error for number in range(4)]
    assert errors[0] == ""
    assert "error=500" in errors[1]
    assert "onnection error" in errors[2]
    assert errors[3] == "is not a URL that Apprise supports"
    assert SECRET not in "".join(errors)
    assert [(one["title"], one["message"], one["type"]) for one in sink.messages] == [
        (MESSAGE.title, MESSAGE.body, "warning")
    ]


async def test_a_target_that_hangs_is_left_when_its_time_is_over(sink: HttpSink) -> None:
    targets = NotifyTargets((sink.url("hang"),), lambda text: text)
    results = await targets.deliver({0: [MESSAGE]}, seconds=0.2)
    assert results[0].delivered == 0
    assert results[0].error == "no answer within 0.2 s"


async def test_an_alert_of_each_kind_and_of_each_rule_arrives(sink: HttpSink, tmp_path: Path) -> None:
    reported = tmp_path / "alerts.yaml"  # of two kinds nobody is told unless somebody wants it
    reported.write_text("kinds: {policy_not_in_force: {notify: true}, profile_not_in_force: {notify: true}}")
    settings = {
        "NOTIFY_URLS": sink.url(SECRET),
        "miner.daemon.PERIOD_SECONDS": "0.1",
        "ALERTS_FILE": str(reported),
    }
    async with open_daemon(tmp_path, **settings) as running:
        daemon = running.daemon
        rules = list(load_alert_rules().rules)
        bad = [kind for kind in AlertKind if not kind.is_good_news]
        good = [kind for kind in AlertKind if kind.is_good_news]
        for kind in bad:
            daemon.alerts(kind, f"text of {kind}")
        for name in rules:
            alert = NewAlert(name, HOST, Severity.WARNING, f"text of {name}")
            (row,) = await daemon.store.write(record_alert, alert, daemon.clock(), notify=True)
            daemon.notifier.add(row)
        await until(lambda: all(f"] {name}, " in sink.text for name in (*bad, *rules)))
        for kind in good:
            daemon.alerts(kind, f"text of {kind}")
        await until(lambda: all(f"text of {kind}" in sink.text for kind in good))
        assert "[resolved] metagraph_stale, miner" in sink.text
        await until(lambda: not daemon.notifier.status()[0].waiting)
        assert all(
            row.notified_at for row in await daemon.store.write(newest_alerts, 1000)
        )  # after the marks
        await _test_message_arrives(running, sink)
        assert SECRET not in (await running.operator.get("/status")).text
    assert "apprise" not in sys.modules


async def _test_message_arrives(running: DaemonInProcess, sink: HttpSink) -> None:
    reply = (await running.operator.post("/alerts/test")).json()
    name = sink.url().removesuffix("/")
    assert reply == {"targets": [{"target": name, "error": None}]}
    assert sink.messages[-1]["title"].endswith(": [info] test, miner")
