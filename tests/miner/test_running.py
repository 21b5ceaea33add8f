from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from miner import running
from miner.settings import Settings, load_settings

TOKEN = "operator-token-0123456789"
EVENTS = b"""\
: hello

id: 1
event: job
data: {"state": "training"}

: still here

id: 2
event: job
data: {"state": "done"}

"""


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        return

    def do_GET(self) -> None:
        if self.headers["authorization"] != f"Bearer {TOKEN}":
            self._say(401, b'{"error": "unauthorized", "message": "send the token"}')
        elif self.path == "/events":
            self._say(200, EVENTS)
        elif self.path == "/broken":
            self._say(502, b"<html>")
        else:
            self._say(200, b'{"path": "%s"}' % self.path.encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"] or 0))
        self._say(409, json.dumps({"error": "job_state", "message": f"no, not {body.decode()}"}).encode())

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        told = {"operator_port": server.server_port}
        (tmp_path / running.RUN_FILE).write_text(json.dumps(told))
        yield load_settings(env={"OPERATOR_TOKEN": TOKEN, "DATA_DIR": str(tmp_path)}, env_file=None)
        server.shutdown()


def test_the_token_of_the_data_folder_is_used_where_none_is_set(settings: Settings, tmp_path: Path) -> None:
    unset = load_settings(env={"DATA_DIR": str(tmp_path)}, env_file=None)
    with pytest.raises(running.Refused, match="send the token"):
        running.ask(unset, "/jobs")
    (tmp_path / running.TOKEN_FILE).write_text(f"{TOKEN}\n")
    assert running.ask(unset, "/jobs") == {"path": "/jobs"}
    assert running.made_token(unset).get_secret_value() == TOKEN


def test_a_page_is_asked_for_with_the_token_and_no_proxy(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://192.0.2.1:9")
    assert running.ask(settings, "/jobs") == {"path": "/jobs"}


def test_a_daemon_that_will_not_is_quoted(settings: Settings) -> None:
    with pytest.raises(running.Refused, match=r'the daemon says: no, not \{"a":1\}'):
        running.tell(settings, "/jobs", {"a": 1})
    with pytest.raises(running.Refused, match="it answered 502"):
        running.ask(settings, "/broken")


def test_events_are_followed_to_their_end(settings: Settings) -> None:
    with running.follow(settings, "/events") as events:
        assert list(events) == [("job", {"state": "training"}), ("job", {"state": "done"})]


def test_a_daemon_that_is_not_there_is_told(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / running.RUN_FILE).write_text('{"operator_port": 1}')
    with pytest.raises(running.NoDaemon, match="does not answer"):
        running.ask(settings, "/jobs")
    for text in ("", "[]", "{}", '{"operator_port": "x"}'):
        (tmp_path / running.RUN_FILE).write_text(text)
        with pytest.raises(running.NoDaemon, match="no daemon runs"):
            running.tell(settings, "/jobs")
    (tmp_path / running.RUN_FILE).unlink()
    with (
        pytest.raises(running.NoDaemon, match="god-miner run starts one"),
        running.follow(settings, "/events"),
    ):
        pass
