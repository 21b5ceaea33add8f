"""Each check tells good from bad, and what to do about it."""

import json
import os
import resource
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from miner.doctor import Finding, Status, Surroundings
from miner.doctor.checks import clock, data_dir, environment, host, pm2, ports, store, wallet
from miner.identity import create_throwaway
from miner.settings import Settings, load_settings
from miner.store import database
from tests.doubles.each import each


def settings(tmp_path: Path, **more: object) -> Settings:
    return load_settings(
        env={}, env_file=None, data_dir=tmp_path / "data", wallet_path=tmp_path / "wallets", **more
    )


def found(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


# environment


def test_a_setting_file_that_others_can_read_is_warned_of(tmp_path: Path) -> None:
    env_file = tmp_path / ".env"
    env_file.write_text("NETUID=56\n")
    env_file.chmod(0o644)
    surroundings = Surroundings(settings(tmp_path), env_file)
    assert found(environment.run(surroundings))["secrets"].fix == f"chmod 600 {env_file}"
    env_file.chmod(0o600)
    assert found(environment.run(surroundings))["secrets"].status is Status.OK
    env_file.unlink()
    assert "secrets" not in found(environment.run(surroundings))


def test_a_slip_in_the_setting_file_is_a_finding(tmp_path: Path) -> None:
    env_file = tmp_path / ".env"
    env_file.write_text("MAX_HOUR=3\n")
    loaded = load_settings(env={}, env_file=env_file)
    last = list(environment.run(Surroundings(loaded, tmp_path / "none")))[-1]
    assert last.status is Status.WARN
    assert "did you mean MAX_HOURS?" in last.detail


# host


@each(
    ("soft", "hard", "status", "way_out"),
    [
        (4096, 4096, Status.OK, ""),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, Status.OK, ""),
        (1024, 4096, Status.WARN, "ulimit -n 1280"),
        (1024, resource.RLIM_INFINITY, Status.WARN, "ulimit -n 1280"),
        (1024, 1024, Status.WARN, "raise the hard limit of 1024"),
    ],
)
def test_too_few_open_files_are_told_with_the_limit_to_raise(
    soft: int, hard: int, status: Status, way_out: str
) -> None:
    finding = host.open_files(1280, soft, hard)
    assert finding.status is status
    assert way_out in finding.fix


# data directory


def test_a_data_directory_is_tried_for_real(tmp_path: Path) -> None:
    surroundings = Surroundings(settings(tmp_path))
    assert "will be made" in found(data_dir.run(surroundings))["data directory"].detail
    surroundings.settings.data_dir.mkdir()
    assert "can be written" in found(data_dir.run(surroundings))["data directory"].detail
    assert list(surroundings.settings.data_dir.iterdir()) == []


def test_a_data_directory_that_is_a_file_is_no_good(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    assert found(data_dir.run(Surroundings(settings(tmp_path))))["data directory"].status is Status.FAIL


def test_a_disk_that_refuses_is_no_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    finding = found(data_dir.run(Surroundings(settings(tmp_path))))["data directory"]
    assert finding.status is Status.FAIL
    assert "Read-only" in finding.detail


@pytest.mark.parametrize(("gib", "status"), [(0.5, Status.FAIL), (20, Status.WARN), (500, Status.OK)])
def test_room_on_the_disk_is_judged(gib: float, status: Status) -> None:
    assert data_dir.room(int(gib * data_dir.GIB), Path("/x")).status is status


@each(
    ("kind", "status"),
    [
        ("ext4", Status.OK),
        ("overlay", Status.OK),
        ("nfs4", Status.WARN),
        ("fuse.sshfs", Status.WARN),
        ("tmpfs", Status.WARN),
    ],
)
def test_disks_of_other_machines_and_memory_are_warned_of(kind: str, status: Status) -> None:
    assert data_dir.disk_kind(kind, Path("/x")).status is status


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
    assert data_dir.file_system(Path(path), MOUNTS) == kind


# database


def test_a_database_is_looked_into(tmp_path: Path) -> None:
    surroundings = Surroundings(settings(tmp_path))
    assert found(store.run(surroundings))["database"].status is Status.SKIP
    path = database.prepare(surroundings.settings.data_dir)
    assert found(store.run(surroundings))["database"].status is Status.OK
    in_use = database.connect(path)
    assert found(store.run(surroundings))["database"].status is Status.OK
    in_use.execute("UPDATE alembic_version SET version_num = '9999'")
    in_use.close()
    assert "newer version" in found(store.run(surroundings))["database"].detail


@pytest.mark.parametrize("keep", [0, 4096 + 100])
def test_a_damaged_database_is_told_with_the_way_back(keep: int, tmp_path: Path) -> None:
    surroundings = Surroundings(settings(tmp_path))
    path = database.prepare(surroundings.settings.data_dir)
    whole = path.read_bytes()
    path.write_bytes(whole[:keep] + b"\xa5" * (len(whole) - keep))
    finding = found(store.run(surroundings))["database"]
    assert finding.status is Status.FAIL
    assert "restore a backup" in finding.fix


# wallet


def test_a_missing_hotkey_is_told_with_the_command_that_makes_one(tmp_path: Path) -> None:
    finding = found(wallet.run(Surroundings(settings(tmp_path, wallet_name="w", hotkey_name="h"))))["hotkey"]
    assert finding.status is Status.FAIL
    assert f"btcli wallet new-hotkey -w w -H h --wallet-path {tmp_path}/wallets" in finding.fix


def test_a_hotkey_that_opens_and_is_guarded_is_good(tmp_path: Path) -> None:
    identity = create_throwaway(tmp_path / "wallets", "default")
    findings = found(wallet.run(Surroundings(settings(tmp_path))))
    assert {finding.status for finding in findings.values()} == {Status.OK}
    assert identity.ss58_address in findings["hotkey"].detail


def test_a_hotkey_that_others_can_read_is_warned_of(tmp_path: Path) -> None:
    create_throwaway(tmp_path / "wallets", "default")
    path = tmp_path / "wallets/default/hotkeys/default"
    path.chmod(0o640)
    finding = found(wallet.run(Surroundings(settings(tmp_path))))["hotkey file"]
    assert (finding.status, finding.fix) == (Status.WARN, f"chmod 600 {path}")


def test_a_coldkey_on_the_machine_is_warned_of(tmp_path: Path) -> None:
    create_throwaway(tmp_path / "wallets", "default")
    (tmp_path / "wallets/default/coldkey").write_text("{}")
    assert found(wallet.run(Surroundings(settings(tmp_path))))["coldkey"].status is Status.WARN


def test_an_encrypted_hotkey_without_a_password_is_told_and_not_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "wallets/default/hotkeys/default"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"$NACL" + bytes(100))  # encrypting a real one takes three seconds
    finding = found(wallet.run(Surroundings(settings(tmp_path))))["hotkey"]
    assert finding.status is Status.FAIL
    assert "WALLET_PASSWORD" in finding.fix


def test_a_file_that_is_no_key_is_a_failure_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "wallets/default/hotkeys/default"
    path.parent.mkdir(parents=True)
    path.write_text('{"secretPhrase": "half a key')
    finding = found(wallet.run(Surroundings(settings(tmp_path))))["hotkey"]
    assert finding.status is Status.FAIL
    assert "half a key" not in finding.detail


# clock


@each(
    ("offset", "status", "words"),
    [
        (0.4, Status.OK, "within 1 s"),
        (-12, Status.WARN, "12 s behind"),
        (30, Status.WARN, "30 s ahead"),
        (90, Status.FAIL, "90 s ahead"),
        (-3600, Status.FAIL, "3600 s behind"),
    ],
)
def test_a_clock_is_judged_by_how_far_it_is_off(offset: float, status: Status, words: str) -> None:
    finding = clock.judged(offset, "node")
    assert finding.status is status
    assert words in finding.detail


def test_the_clock_is_compared_with_the_answer_of_the_chain_node(tmp_path: Path) -> None:
    with _server(date="Mon, 02 Jan 2023 03:04:05 GMT") as port:
        address = f"ws://127.0.0.1:{port}/a-key-that-must-stay-secret"
        surroundings = Surroundings(settings(tmp_path, chain="bittensor", subtensor_address=address))
        finding = found(clock.run(surroundings))["clock"]
    assert finding.status is Status.FAIL
    assert "ahead of" in finding.detail
    assert "a-key-that" not in finding.detail


@pytest.mark.parametrize("date", [None, "yesterday"])
def test_a_node_that_tells_no_time_is_no_verdict(tmp_path: Path, date: str | None) -> None:
    with _server(date=date) as port:
        where = {"chain": "bittensor", "subtensor_address": f"ws://127.0.0.1:{port}"}
        assert found(clock.run(Surroundings(settings(tmp_path, **where))))["clock"].status is Status.SKIP


def test_without_a_chain_there_is_nothing_to_compare_the_clock_with(tmp_path: Path) -> None:
    finding = found(clock.run(Surroundings(settings(tmp_path))))["clock"]
    assert (finding.status, "CHAIN=file" in finding.detail) == (Status.SKIP, True)


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("echo yes", Status.OK),
        ("echo no", Status.WARN),
        ("echo 'not booted with systemd' >&2; exit 1", Status.SKIP),
        (None, Status.SKIP),
    ],
)
def test_the_time_service_is_asked_where_there_is_one(
    script: str | None, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script:
        _program(tmp_path / "timedatectl", script)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found(clock.run(Surroundings(settings(tmp_path))))["time service"].status is status


def test_the_nodes_behind_the_network_names_are_those_of_the_sdk() -> None:
    source = Path(_package("bittensor"), "settings.py").read_text()
    for name, address in clock.NODES.items():
        assert f'"{name}": ' in source
        assert f'"{address}"' in source


# ports


def test_free_ports_are_good_and_port_zero_needs_no_look(tmp_path: Path) -> None:
    findings = found(ports.run(Surroundings(settings(tmp_path, public_port=_free_port(), operator_port=0))))
    assert findings["public port"].status is Status.OK
    assert findings["operator port"].status is Status.SKIP
    assert "daemon" not in findings


def test_a_port_held_by_a_stranger_is_told_with_the_way_to_find_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        finding = found(ports.run(Surroundings(settings(tmp_path, public_port=port))))["public port"]
    assert finding.status is Status.FAIL
    assert f"ss -ltnp 'sport = :{port}'" in finding.fix
    assert "PUBLIC_PORT" in finding.fix


def test_an_address_of_another_machine_can_not_be_listened_on(tmp_path: Path) -> None:
    here = settings(tmp_path, public_host="192.0.2.1", public_port=_free_port())
    finding = found(ports.run(Surroundings(here)))["public port"]
    assert finding.status is Status.FAIL
    assert "PUBLIC_HOST" in finding.fix


def _announced(tmp_path: Path, port: int, pid: int) -> Surroundings:
    here = settings(tmp_path, public_port=port, operator_port=0)
    here.data_dir.mkdir()
    told = {"pid": pid, "public_port": port, "operator_port": 1}
    (here.data_dir / "daemon.json").write_text(json.dumps(told))
    return Surroundings(here)


def test_a_port_held_by_our_own_daemon_is_good_if_it_answers(tmp_path: Path) -> None:
    with _server(body={"status": "ok", "version": "9.9"}) as port:
        findings = found(ports.run(_announced(tmp_path, port, os.getpid())))
    assert findings["public port"].status is Status.OK
    assert f"pid {os.getpid()}" in findings["public port"].detail
    assert "9.9" in findings["daemon"].detail


def test_a_daemon_that_holds_its_port_and_does_not_answer_is_a_failure(tmp_path: Path) -> None:
    with _server(body=["something", "else"]) as port:
        finding = found(ports.run(_announced(tmp_path, port, os.getpid())))["daemon"]
    assert finding.status is Status.FAIL
    assert "/healthz" in finding.detail


def test_what_a_dead_daemon_left_behind_is_not_believed(tmp_path: Path) -> None:
    with _server() as port:
        findings = found(ports.run(_announced(tmp_path, port, 2**22 + 1)))
    assert findings["public port"].status is Status.FAIL
    assert "daemon" not in findings


# pm2


def test_pm2_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = pm2.run(Surroundings(settings(tmp_path)))
    assert finding.status is Status.SKIP


def test_pm2_without_log_rotation_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lib/pm2"
    (package / "bin").mkdir(parents=True)
    (package / "package.json").write_text('{"version": "7.0.4"}')
    _program(package / "bin/pm2", "echo must not be called; exit 9")
    (tmp_path / "pm2").symlink_to(package / "bin/pm2")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PM2_HOME", str(tmp_path / "home"))
    findings = found(pm2.run(Surroundings(settings(tmp_path))))
    assert "7.0.4" in findings["pm2"].detail
    assert findings["log rotation"].status is Status.WARN
    (tmp_path / "home/modules/pm2-logrotate").mkdir(parents=True)
    assert found(pm2.run(Surroundings(settings(tmp_path))))["log rotation"].status is Status.OK


class _server:
    """A web server on loopback that answers everything alike."""

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


def _package(name: str) -> str:
    from importlib.util import find_spec

    spec = find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations
    return spec.submodule_search_locations[0]
