"""Each check tells good from bad, and says what to do about it."""

import json
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from miner.chain.identity import create_temporary_hotkey
from miner.doctor import CheckContext, Finding, FindingStatus
from miner.doctor.checks import machine, subnet
from miner.settings import load_settings
from miner.store import database
from tests.doubles.each import each

pytestmark = pytest.mark.process


OK, WARN, FAIL, SKIP = FindingStatus.OK, FindingStatus.WARN, FindingStatus.FAIL, FindingStatus.SKIP
Findings = dict[str, Finding]
Check = Callable[..., Findings]


def by_name(findings: Iterable[Finding]) -> Findings:
    return {finding.what: finding for finding in findings}


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Run a check on a data directory and wallets of its own; return its findings by name."""

    def run(function: Callable[[CheckContext], Iterable[Finding]], **more: Any) -> Findings:
        own = {"data_dir": tmp_path / "data", "wallet_path": tmp_path / "wallets", **more}
        return by_name(function(CheckContext(load_settings(env={}, env_file=None, **own))))

    return run


# The machine


def test_slips_in_the_settings_file_and_a_file_that_others_can_read_are_warned_of(tmp_path: Path) -> None:
    env_file = tmp_path / ".env"
    env_file.write_text("MAX_HOUR=3\n")
    context = CheckContext(load_settings(env={}, env_file=env_file), env_file)
    for mode, status, fix in ((0o644, WARN, f"chmod 600 {env_file}"), (0o600, OK, "")):
        env_file.chmod(mode)
        found = by_name(machine.check_settings(context))
        assert (found["secrets"].status, found["secrets"].fix) == (status, fix)
        assert (found["settings"].status, "did you mean MAX_HOURS?" in found["settings"].detail) == (
            WARN,
            True,
        )
    env_file.unlink()
    assert "secrets" not in by_name(machine.check_settings(context))


@each(
    ("soft", "hard", "status", "way_out"),
    [
        (4096, 4096, OK, ""),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, OK, ""),
        (1024, 4096, WARN, "ulimit -n 1280"),
        (1024, resource.RLIM_INFINITY, WARN, "ulimit -n 1280"),
        (1024, 1024, WARN, "raise the hard limit of 1024"),
    ],
)
def test_too_few_open_files_come_with_the_limit_to_raise(
    soft: int, hard: int, status: FindingStatus, way_out: str
) -> None:
    finding = machine.open_files(1280, soft, hard)
    assert finding.status is status
    assert way_out in finding.fix


# The data directory and the database


def test_a_data_directory_is_tried_for_real(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tried(**more: Any) -> Finding:
        return check(machine.check_data_dir, **more)["data directory"]

    assert "will be created" in tried().detail
    (tmp_path / "data").mkdir()
    assert "can be written" in tried().detail
    assert list((tmp_path / "data").iterdir()) == []
    (tmp_path / "file").write_text("")
    assert tried(data_dir=tmp_path / "file").status is FAIL
    monkeypatch.setattr("tempfile.TemporaryFile", Mock(side_effect=OSError(30, "Read-only file system")))
    assert (tried().status, "Read-only" in tried().detail) == (FAIL, True)


@each(("gib", "status"), [(0.5, FAIL), (20, WARN), (500, OK)])
def test_free_disk_space_is_checked(gib: float, status: FindingStatus) -> None:
    assert machine.disk_space(int(gib * machine.GIB), Path("/x")).status is status


@each(
    ("kind", "status"),
    [
        ("ext4", OK),
        ("overlay", OK),
        ("nfs4", WARN),
        ("fuse.sshfs", WARN),
        ("tmpfs", WARN),
    ],
)
def test_disks_of_other_machines_and_memory_are_warned_of(kind: str, status: FindingStatus) -> None:
    assert machine.disk_kind(kind, Path("/x")).status is status


MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw
40 27 0:40 / /mnt rw - nfs4 server:/x rw
41 40 0:41 / /mnt/with\\040blank rw master:3 shared:7 - xfs /dev/b rw
42 40 0:42 / /mnt/new rw - ext4 /dev/c rw
43 42 0:43 / /mnt/new rw - tmpfs none rw
"""


@each(
    ("path", "kind"),
    [
        ("/home/x", "ext4"),
        ("/mnt", "nfs4"),
        ("/mnt/a/b", "nfs4"),
        ("/mntx", "ext4"),
        ("/mnt/with blank/x", "xfs"),
        ("/mnt/new/x", "tmpfs"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_the_deepest_and_last_mount(path: str, kind: str) -> None:
    assert machine.file_system(Path(path), MOUNTS) == kind


def test_a_database_is_read(check: Check, tmp_path: Path) -> None:
    assert check(machine.check_store)["database"].status is SKIP
    path = database.prepare_store(tmp_path / "data")
    assert check(machine.check_store)["database"].status is OK
    in_use = database.connect(path)
    assert check(machine.check_store)["database"].status is OK
    in_use.execute("PRAGMA user_version = 9999")
    in_use.close()
    assert "newer version" in check(machine.check_store)["database"].detail


@pytest.mark.parametrize("keep", [0, 4096 + 100])
def test_a_damaged_database_says_how_to_restore_it(check: Check, tmp_path: Path, keep: int) -> None:
    path = database.prepare_store(tmp_path / "data")
    whole = path.read_bytes()
    path.write_bytes(whole[:keep] + b"\xa5" * (len(whole) - keep))
    finding = check(machine.check_store)["database"]
    assert (finding.status, "restore a backup" in finding.fix) == (FAIL, True)


# The wallet


def test_a_missing_hotkey_comes_with_the_command_that_makes_one(check: Check, tmp_path: Path) -> None:
    finding = check(subnet.check_wallet, wallet_name="w", hotkey_name="h")["hotkey"]
    assert finding.status is FAIL
    assert f"btcli wallet new-hotkey -w w -H h --wallet-path {tmp_path}/wallets" in finding.fix


def test_a_hotkey_that_opens_and_is_guarded_is_good(check: Check, tmp_path: Path) -> None:
    identity = create_temporary_hotkey(tmp_path / "wallets", "default")
    findings = check(subnet.check_wallet)
    assert {finding.status for finding in findings.values()} == {OK}
    assert identity.ss58_address in findings["hotkey"].detail
    path = tmp_path / "wallets/default/hotkeys/default"
    path.chmod(0o640)
    finding = check(subnet.check_wallet)["hotkey file"]
    assert (finding.status, finding.fix) == (WARN, f"chmod 600 {path}")
    (tmp_path / "wallets/default/coldkey").write_text("{}")
    assert check(subnet.check_wallet)["coldkey"].status is WARN


# Encrypting a real one takes three seconds.
@each(
    ("content", "fix"),
    [(b"$NACL" + bytes(100), "WALLET_PASSWORD"), (b'{"secretPhrase": "half a key', "correct or restore")],
)
def test_a_hotkey_that_cannot_be_opened_fails_and_is_not_shown(
    check: Check, tmp_path: Path, content: bytes, fix: str
) -> None:
    path = tmp_path / "wallets/default/hotkeys/default"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    finding = check(subnet.check_wallet)["hotkey"]
    assert (finding.status, fix in finding.fix) == (FAIL, True)
    assert "half a key" not in finding.detail


# The clock


@each(
    ("offset", "status", "words"),
    [
        (0.4, OK, "within 1 s"),
        (-12, WARN, "12 s behind"),
        (30, WARN, "30 s ahead"),
        (90, FAIL, "90 s ahead"),
        (-3600, FAIL, "3600 s behind"),
    ],
)
def test_a_clock_is_judged_by_how_far_it_is_off(offset: float, status: FindingStatus, words: str) -> None:
    finding = machine.clock_finding(offset, "node")
    assert finding.status is status
    assert words in finding.detail


def test_the_clock_is_compared_with_the_date_of_the_chain_node(check: Check) -> None:
    with _server(date="Mon, 02 Jan 2023 03:04:05 GMT") as port:
        address = f"ws://127.0.0.1:{port}/a-key-that-must-stay-secret"
        finding = check(machine.check_clock, chain="bittensor", subtensor_address=address)["clock"]
    assert (finding.status, "ahead of" in finding.detail) == (FAIL, True)
    assert "a-key-that" not in finding.detail


@each("date", [None, "yesterday"])
def test_without_a_chain_or_a_date_there_is_nothing_to_compare_the_clock_with(
    check: Check, date: str | None
) -> None:
    with _server(date=date) as port:
        where = {"chain": "bittensor", "subtensor_address": f"ws://127.0.0.1:{port}"}
        assert check(machine.check_clock, **where)["clock"].status is SKIP
    finding = check(machine.check_clock)["clock"]
    assert (finding.status, "CHAIN=file" in finding.detail) == (SKIP, True)


@each(
    ("script", "status"),
    [
        (None, SKIP),
        ("echo yes", OK),
        ("echo no", WARN),
        ("echo 'not booted with systemd' >&2; exit 1", SKIP),
    ],
)
def test_the_time_service_is_asked_where_there_is_one(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, status: FindingStatus
) -> None:
    if script:
        _program(tmp_path / "timedatectl", script)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check(machine.check_clock)["time service"].status is status


def test_the_nodes_behind_the_network_names_are_those_of_the_sdk() -> None:
    spec = find_spec("bittensor")
    assert spec
    assert spec.origin
    source = Path(spec.origin).with_name("settings.py").read_text()
    for name, address in machine.NODES.items():
        assert f'"{name}": ' in source
        assert f'"{address}"' in source


# The ports


def test_free_ports_are_good_and_port_zero_is_skipped(check: Check) -> None:
    # An address of this test's own: another program may take a port of 127.0.0.1 that was free a moment ago.
    findings = check(subnet.check_ports, public_host="127.83.7.1", public_port=_free_port(), operator_port=0)
    assert (findings["public port"].status, findings["operator port"].status) == (OK, SKIP)
    assert "daemon" not in findings


def test_a_port_that_cannot_be_listened_on_says_what_to_do(check: Check) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        finding = check(subnet.check_ports, public_port=port)["public port"]
    assert finding.status is FAIL
    assert f"ss -ltnp 'sport = :{port}'" in finding.fix
    assert "PUBLIC_PORT" in finding.fix
    finding = check(subnet.check_ports, public_host="192.0.2.1", public_port=_free_port())["public port"]
    assert (finding.status, "PUBLIC_HOST" in finding.fix) == (FAIL, True)


@each(
    ("body", "pid", "port_status", "daemon_status", "words"),
    [
        ({"status": "ok", "version": "9.9"}, os.getpid(), OK, OK, "9.9"),
        (["something", "else"], os.getpid(), OK, FAIL, "/healthz"),
        (None, 2**22 + 1, FAIL, None, ""),  # the file of a dead daemon
    ],
)
def test_a_port_held_by_this_daemon_is_good_and_the_daemon_if_it_answers(
    body: object,
    pid: int,
    port_status: FindingStatus,
    daemon_status: FindingStatus | None,
    words: str,
    check: Check,
    tmp_path: Path,
) -> None:
    (tmp_path / "data").mkdir(exist_ok=True)
    with _server(body=body) as port:
        content = {"pid": pid, "public_port": port, "operator_port": 1}
        (tmp_path / "data" / "daemon.json").write_text(json.dumps(content))
        findings = check(subnet.check_ports, public_port=port, operator_port=0)
    assert findings["public port"].status is port_status
    daemon = findings.get("daemon")
    assert (daemon and daemon.status) is daemon_status
    assert words in (daemon.detail if daemon else "")


# pm2


def test_pm2_is_not_needed_and_is_warned_of_without_log_rotation(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PM2_HOME", str(tmp_path / "home"))
    assert [finding.status for finding in check(machine.check_pm2).values()] == [SKIP]
    package = tmp_path / "lib/pm2"
    (package / "bin").mkdir(parents=True)
    (package / "package.json").write_text('{"version": "7.0.4"}')
    _program(package / "bin/pm2", "echo must not be called; exit 9")
    (tmp_path / "pm2").symlink_to(package / "bin/pm2")
    findings = check(machine.check_pm2)
    assert "7.0.4" in findings["pm2"].detail
    assert findings["log rotation"].status is WARN
    (tmp_path / "home/modules/pm2-logrotate").mkdir(parents=True)
    assert check(machine.check_pm2)["log rotation"].status is OK


class _server:
    """A web server on loopback that sends the same reply to every request."""

    def __init__(self, *, date: str | None = None, body: object = None) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response_only(200 if body is not None else 405)
                if date is not None:
                    self.send_header("Date", date)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> int:
        self._thread.start()
        return int(self._server.server_address[1])

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
