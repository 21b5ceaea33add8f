import os
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest

from miner.dev import stack
from miner.dev.stack import ChildProcess, StackError

pytestmark = pytest.mark.process


#: A server in a few lines, told by its arguments how to behave.
SERVER = """
import http.server, json, os, signal, sys, time
port, manner = int(sys.argv[1]), sys.argv[2]
if manner == "die": print("out of luck"); sys.exit(9)
if manner == "deaf": signal.signal(signal.SIGTERM, signal.SIG_IGN)
else: signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if manner == "sick" else 200); self.end_headers()
        self.wfile.write(json.dumps(dict(os.environ)).encode())
    def log_message(self, *_): pass
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def child(folder: Path, manner: str = "good", **settings: str) -> ChildProcess:
    (port,) = stack.free_ports(1)
    command = [sys.executable, "-c", SERVER, str(port), manner]
    return ChildProcess(command, port, folder, folder / "log", settings)


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_free_ports_are_different_and_nobody_listens_there() -> None:
    ports = stack.free_ports(20)
    assert len(set(ports)) == 20
    with socket.create_server(("127.0.0.1", ports[0])):
        pass


def test_a_child_is_stopped_by_sigterm_also_when_the_block_fails(
    tmp_path: Path,
) -> None:
    server = child(tmp_path)
    assert server.stop() is None, "it never ran"
    with server:
        assert server.start_s > 0
        assert server.log_tail() == "listening"
        assert server.stop() == server.stop() == 7
    assert is_gone(server.pid)
    failing = child(tmp_path)
    with pytest.raises(ZeroDivisionError), failing:
        _ = 1 // 0
    assert is_gone(failing.pid)


def test_a_child_that_does_not_hear_sigterm_is_killed(tmp_path: Path) -> None:
    with child(tmp_path, "deaf") as server:
        assert server.stop(limit_s=0.2) == -signal.SIGKILL


def test_a_child_that_ends_early_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"ended with code 9(.|\n)*out of luck"):
        child(tmp_path, "die").start()


def test_a_child_that_never_gets_well_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "START_LIMIT_S", 0.3)
    server = child(tmp_path, "sick")
    with pytest.raises(StackError, match=r"did not answer within 0\.3 s"):
        server.start()
    assert is_gone(server.pid)


def test_a_child_sees_its_settings_and_nothing_of_the_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WALLET_PASSWORD", "the operator's own")
    monkeypatch.setenv("DATA_DIR", "/the/operator's/own")
    server = child(tmp_path, MAX_JOBS="3")
    assert server.environment["MAX_JOBS"] == "3"
    assert server.environment["HOME"] == str(tmp_path)
    assert server.environment["PATH"] == os.environ["PATH"]
    assert not {"WALLET_PASSWORD", "DATA_DIR"} & server.environment.keys()


def test_a_stack_keeps_everything_in_its_folder(tmp_path: Path) -> None:
    prepared = stack.prepare_stack(tmp_path / "made")
    assert prepared.public_port != prepared.operator_port
    settings = prepared.settings()
    paths = {settings[name] for name in ("DATA_DIR", "NODES_FILE", "WALLET_PATH")}
    assert all(Path(path).is_relative_to(tmp_path) for path in paths)
    assert settings["PUBLIC_HOST"] == settings["OPERATOR_HOST"] == "127.0.0.1"
    assert prepared.url == f"http://127.0.0.1:{settings['PUBLIC_PORT']}"
    assert prepared.operator_url == f"http://127.0.0.1:{settings['OPERATOR_PORT']}"
    again = stack.prepare_stack(tmp_path / "made")
    assert again.keys.miner.ss58_address == prepared.keys.miner.ss58_address


def test_the_daemon_gets_the_stacks_settings_and_the_callers_on_top(tmp_path: Path) -> None:
    prepared = stack.prepare_stack(tmp_path)
    server = stack.daemon_process(prepared, {"MAX_JOBS": "2", "LOG_FORMAT": "console"})
    assert server.port == prepared.public_port
    assert server.environment["DATA_DIR"] == str(tmp_path / "data")
    assert (server.environment["MAX_JOBS"], server.environment["LOG_FORMAT"]) == ("2", "console")


def test_a_daemon_with_other_constants_runs_with_them(tmp_path: Path) -> None:
    prepared = stack.prepare_stack(tmp_path)
    with stack.daemon_process(prepared, {"miner.server.MAX_BODY_BYTES": "2"}) as server:
        assert not any("." in name for name in server.environment)
        assert httpx.post(f"{prepared.url}/task_offer/", content=b"{...}").status_code == 413
    with pytest.raises(StackError, match="NO_SUCH"):
        stack.daemon_process(prepared, {"miner.server.NO_SUCH": "2"}).start()
