from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pydantic import BaseModel

from miner import daemon_client
from miner.api.alerts import SilenceRequest
from miner.api.jobs import StartedJob
from miner.settings import Settings, load_settings

pytestmark = pytest.mark.process


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


class Echo(BaseModel):
    path: str


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        content = {"pid": 1, "public_port": 1, "operator_port": server.server_port}
        (tmp_path / daemon_client.RUN_FILE).write_text(json.dumps(content))
        yield load_settings(env={"OPERATOR_TOKEN": TOKEN, "DATA_DIR": str(tmp_path)}, env_file=None)
        server.shutdown()


def test_the_token_of_the_data_folder_is_used_where_none_is_set(settings: Settings, tmp_path: Path) -> None:
    unset = load_settings(env={"DATA_DIR": str(tmp_path)}, env_file=None)
    with pytest.raises(daemon_client.DaemonRefused, match="send the token"):
        daemon_client.get(unset, "/jobs", Echo)
    (tmp_path / daemon_client.TOKEN_FILE).write_text(f"{TOKEN}\n")
    assert daemon_client.get(unset, "/jobs", Echo).path == "/jobs"
    assert daemon_client.ensure_operator_token(unset).get_secret_value() == TOKEN


def test_a_page_is_asked_for_with_the_token_and_no_proxy(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://192.0.2.1:9")
    assert daemon_client.get(settings, "/jobs", Echo).path == "/jobs"


def test_a_daemon_that_will_not_is_quoted(settings: Settings) -> None:
    with pytest.raises(daemon_client.DaemonRefused, match=r'the daemon says: no, not .*"seconds":1'):
        daemon_client.post(settings, "/jobs", StartedJob, SilenceRequest(seconds=1))
    with pytest.raises(daemon_client.DaemonRefused, match="it answered 502"):
        daemon_client.get(settings, "/broken", Echo)


def test_events_are_followed_to_their_end(settings: Settings) -> None:
    with daemon_client.follow_page_events(settings, "/events") as events:
        assert list(events) == [("job", {"state": "training"}), ("job", {"state": "done"})]


def test_without_a_daemon_the_error_says_so(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / daemon_client.RUN_FILE).write_text('{"pid": 1, "public_port": 1, "operator_port": 1}')
    with pytest.raises(daemon_client.NoDaemon, match="does not answer"):
        daemon_client.get(settings, "/jobs", Echo)
    for text in ("", "[]", "{}", '{"operator_port": "x"}'):
        (tmp_path / daemon_client.RUN_FILE).write_text(text)
        with pytest.raises(daemon_client.NoDaemon, match="no daemon runs"):
            daemon_client.post(settings, "/jobs", StartedJob)
    (tmp_path / daemon_client.RUN_FILE).unlink()
    with (
        pytest.raises(daemon_client.NoDaemon, match="god-miner run starts one"),
        daemon_client.follow_page_events(settings, "/events"),
    ):
        pass
