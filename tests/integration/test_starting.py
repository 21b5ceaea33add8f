"""The daemon as a process: how it starts, and why it does not."""

from __future__ import annotations

import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from miner.chain.identity import hotkey_file
from miner.daemon_client import RUN_FILE
from miner.dev.stack import (
    HOTKEY_NAME,
    MINER_WALLET,
    ChildProcess,
    DevStack,
    daemon_process,
    free_ports,
    prepare_stack,
)
from miner.server import DaemonExitCode
from miner.store.database import FILE_NAME, LOCK_NAME
from tests.integration import raw
from tests.integration.conftest import Ended
from tests.integration.traffic import assert_whole, store

pytestmark = pytest.mark.integration

Running = Callable[..., ChildProcess]
Ending = Callable[..., Ended]


#: What the daemon is made of, and no more.
IMPORTS = "import fastapi, uvicorn"
#: It was 2.4 when this was set; the packages of a chain or of a hub cost as much again.
MOST_TIMES_IMPORTS = 4.0


def test_a_start_costs_little_more_than_its_imports(running: Running) -> None:
    """In processor time, which a busy machine hardly lengthens; `benchmarks/` has the seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    imports = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    child = running()
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    taken = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    print(f"a start: {taken:.2f} s, its imports: {imports:.2f} s")
    assert taken < MOST_TIMES_IMPORTS * imports


def test_the_run_file_tells_ports_that_answer_and_goes_with_the_daemon(
    stack: DevStack, running: Running
) -> None:
    child = running()
    told = json.loads((stack.data_dir / RUN_FILE).read_text())
    assert told == {
        "pid": child.pid,
        "public_port": stack.public_port,
        "operator_port": stack.operator_port,
    }
    assert child.stop() == DaemonExitCode.OK
    assert not (stack.data_dir / RUN_FILE).exists()


def test_what_it_says_it_listens_on_it_listens_on(stack: DevStack) -> None:
    child = daemon_process(replace(stack, public_port=0, operator_port=0))
    run_file = stack.data_dir / RUN_FILE
    process = subprocess.Popen(
        child.command, cwd=child.folder, env=child.environment, stderr=subprocess.DEVNULL
    )
    try:
        while not run_file.exists():
            assert process.poll() is None
            time.sleep(0.01)
        told = json.loads(run_file.read_text())
        assert raw.listens(told["public_port"])
        assert raw.listens(told["operator_port"])
    finally:
        process.terminate()
        assert process.wait(60) == DaemonExitCode.OK


@pytest.mark.parametrize("setting", ["PUBLIC_PORT", "OPERATOR_PORT"])
def test_a_port_in_use_is_named_with_its_setting(setting: str, stack: DevStack, ended: Ending) -> None:
    port = int(stack.settings()[setting])
    with raw.occupied(port):
        done = ended()
    assert done.returncode == DaemonExitCode.PORT_IN_USE
    assert f"127.0.0.1:{port} cannot be listened on (Address already in use)" in done.stderr
    assert f"set {setting}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("setting", "host"), [("PUBLIC_HOST", "203.0.113.7"), ("OPERATOR_HOST", "no-such-host.invalid")]
)
def test_an_address_of_another_machine_is_named_with_its_setting(
    setting: str, host: str, ended: Ending
) -> None:
    done = ended(**{setting: host, "OPERATOR_TOKEN": "a-token-of-sixteen-letters"})
    assert done.returncode == DaemonExitCode.PORT_IN_USE
    assert f"{host}:" in done.stderr
    assert setting in done.stderr
    assert "Traceback" not in done.stderr


def test_a_second_daemon_on_the_same_folder_is_refused_and_the_first_goes_on(
    stack: DevStack, running: Running, ended: Ending
) -> None:
    first = running()
    public, operator = free_ports(2)
    done = ended(replace(stack, public_port=public, operator_port=operator))
    assert done.returncode == DaemonExitCode.LOCKED
    assert f"{stack.data_dir} is in use by another god-miner (pid {first.pid})" in done.stderr
    assert "DATA_DIR" in done.stderr
    assert raw.listens(stack.public_port)
    assert first.stop() == DaemonExitCode.OK


def test_two_daemons_for_one_port_started_together_end_as_one(
    tmp_path: Path, stack: DevStack, running: Running
) -> None:
    """Also while neither answers yet."""
    other = replace(prepare_stack(tmp_path / "other"), public_port=stack.public_port)
    children = [daemon_process(stack), daemon_process(other)]
    processes = [
        subprocess.Popen(
            child.command,
            cwd=child.folder,
            env=child.environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for child in children
    ]
    try:
        while (codes := [process.poll() for process in processes]) == [None, None]:
            time.sleep(0.01)
        loser = next(process for process in processes if process.returncode is not None)
        assert sorted(codes, key=str) == sorted([DaemonExitCode.PORT_IN_USE, None], key=str)
        _, told = loser.communicate(timeout=120)
        assert "PUBLIC_PORT" in told
        assert "Traceback" not in told
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_wrong_settings_are_told_all_at_once(ended: Ending) -> None:
    done = ended(
        NETUID="fifty-six",
        PUBLIC_PORT="99999",
        MAX_HOURS="-1",
        TRAINING_REPO_TEXT_URL="https://github.com/owner/name",
        TRAINING_REPO_TEXT_COMMIT="main",
        OPERATOR_HOST="0.0.0.0",
    )
    assert done.returncode == DaemonExitCode.CONFIG
    assert done.stdout == ""
    for variable, value in (
        ("NETUID", "'fifty-six'"),
        ("PUBLIC_PORT", "'99999'"),
        ("MAX_HOURS", "'-1'"),
        ("TRAINING_REPO_TEXT_COMMIT", "'main'"),
        ("OPERATOR_TOKEN", "must be set"),
    ):
        assert any(variable in line and value in line for line in done.stderr.splitlines()), variable
    assert "5 problems" in done.stderr


def test_a_missing_wallet_is_told_with_the_way_out(stack: DevStack, ended: Ending) -> None:
    done = ended(WALLET_NAME="mistyped")
    assert done.returncode == DaemonExitCode.CONFIG
    assert f"there is no hotkey at {stack.keys.wallet_path / 'mistyped/hotkeys/default'}" in done.stderr
    assert "WALLET_NAME" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_store_of_a_newer_version_is_refused_and_left_as_it_is(
    stack: DevStack, running: Running, ended: Ending
) -> None:
    running().stop()
    path = stack.data_dir / FILE_NAME
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 9999")
        connection.commit()
    before = path.read_bytes()
    done = ended()
    assert done.returncode == DaemonExitCode.CONFIG
    assert "schema 9999" in done.stderr
    assert "run the newer god-miner" in done.stderr
    assert path.read_bytes() == before


def store_of_an_unreleased_version() -> bytes:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
        return connection.serialize()


@pytest.mark.parametrize(
    "content",
    [
        b"not a database at all\n" * 500,
        b"SQLite format 3\0" + b"\1" * 5000,
        store_of_an_unreleased_version(),
    ],
    ids=["no database", "damaged", "unreleased version"],
)
def test_a_file_that_cannot_be_used_is_refused_and_left_as_it_is(
    content: bytes, stack: DevStack, ended: Ending
) -> None:
    stack.data_dir.mkdir()
    path = stack.data_dir / FILE_NAME
    path.write_bytes(content)
    done = ended()
    assert done.returncode == DaemonExitCode.CONFIG
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr
    assert path.read_bytes() == content


def imports(pid: int) -> bool:
    """Whether it is among its imports: past those of the interpreter itself, where a signal makes another end
    of it, and not yet at the last one."""
    try:
        return "pydantic_core" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # a system that does not tell
        time.sleep(0.3)
        return True


def lock_taken(stack: DevStack) -> bool:
    return (stack.data_dir / LOCK_NAME).exists()


def store_created(stack: DevStack) -> bool:
    return (stack.data_dir / FILE_NAME).exists()


def run_file_written(stack: DevStack) -> bool:
    return (stack.data_dir / RUN_FILE).exists()


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        (None, signal.SIGINT),
        (lock_taken, signal.SIGTERM),
        (store_created, signal.SIGTERM),
        (run_file_written, signal.SIGINT),
    ],
)
def test_a_signal_during_the_start_ends_it_and_the_next_start_works(
    moment: Callable[[DevStack], bool] | None, number: signal.Signals, stack: DevStack, running: Running
) -> None:
    child = daemon_process(stack)
    with subprocess.Popen(
        child.command,
        cwd=child.folder,
        env=child.environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        began = time.perf_counter()
        while not (imports(process.pid) if moment is None else moment(stack)):
            assert process.poll() is None
            assert time.perf_counter() - began < 120
        process.send_signal(number)
        _, told = process.communicate(timeout=120)
    # Before it can listen to signals it dies of them; from then on it ends in good order.
    assert process.returncode in (DaemonExitCode.OK, -number, 128 + number)
    if moment is not None:
        assert "Traceback" not in told
    assert not run_file_written(stack)
    assert not raw.listens(stack.public_port)
    # Otherwise the next start is a first one, or one after a usual stop.
    if moment in (lock_taken, store_created):
        assert running().stop() == DaemonExitCode.OK
        with store(stack) as connection:
            assert_whole(connection)


def test_a_hotkey_that_can_not_be_opened_is_told_at_the_start(stack: DevStack, running: Running) -> None:
    keys = stack.keys
    path = hotkey_file(keys.wallet_path, MINER_WALLET, HOTKEY_NAME)
    path.write_bytes(b"$NACL" + b"x" * 100)
    public = json.dumps({"ss58Address": keys.miner.ss58_address})
    path.with_name(f"{path.name}pub.txt").write_text(public)
    running()
    ends = time.monotonic() + 60
    while "hotkey_locked" not in (said := stack.log_file.read_text()):
        assert time.monotonic() < ends, said
        time.sleep(0.05)
    assert "WALLET_PASSWORD" in said
