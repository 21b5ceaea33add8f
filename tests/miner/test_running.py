"""Asking a daemon from another process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from miner.running import RUN_FILE, NoDaemon, ask
from miner.settings import load_settings
from miner.settings.fields import Settings


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = (
            b"no json"
            if self.path == "/bad"
            else json.dumps({k.lower(): v for k, v in self.headers.items()}).encode()
        )
        self.send_response(404 if self.path == "/none" else 200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def settings(folder: Path, **more: str) -> Settings:
    return load_settings(env={"DATA_DIR": str(folder), **more}, env_file=None)


def announce(folder: Path, port: int) -> None:
    (folder / RUN_FILE).write_text(json.dumps({"operator_port": port}))


def test_the_daemon_is_found_by_what_it_announced_and_given_the_token(tmp_path: Path, port: int) -> None:
    announce(tmp_path, port)
    for host in ("127.0.0.1", "0.0.0.0"):
        told = ask(settings(tmp_path, OPERATOR_TOKEN="x" * 20, OPERATOR_HOST=host), "/fleet")
        assert told["authorization"] == "Bearer " + "x" * 20
        assert told["host"] == f"127.0.0.1:{port}"


def test_the_environments_proxy_gets_nothing_of_it(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    announce(tmp_path, port)
    assert "host" in ask(settings(tmp_path), "/fleet")


@pytest.mark.parametrize("path", ["/none", "/bad"])
def test_what_is_no_page_is_no_daemon(tmp_path: Path, port: int, path: str) -> None:
    announce(tmp_path, port)
    with pytest.raises(NoDaemon, match="does not answer"):
        ask(settings(tmp_path), path)


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"operator_port": "x"}'])
def test_a_folder_that_nobody_announced_in_has_no_daemon(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / RUN_FILE).write_text(content)
    with pytest.raises(NoDaemon, match="god-miner run"):
        ask(settings(tmp_path), "/fleet")


def test_an_announcement_that_was_left_behind_is_no_daemon(tmp_path: Path) -> None:
    announce(tmp_path, 9)
    with pytest.raises(NoDaemon, match="does not answer"):
        ask(settings(tmp_path), "/fleet")
