"""The daemon as a process: how it starts, and why it does not."""

from __future__ import annotations

import json
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from miner.chain.identity import encrypt_keyfile_data, hotkey_file
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
from miner.store.database import FILE_NAME, LOCK_NAME, prepare_store
from tests.doubles.each import each
from tests.integration import raw
from tests.integration.conftest import Ended, assert_ended, spawn
from tests.integration.traffic import assert_whole, store

Running = Callable[..., ChildProcess]
Ending = Callable[..., Ended]


#: Of a chain, of a hub or of a backend: each costs as much as a whole start.
NOT_AT_THE_START = {
    "bittensor",
    "docker",
    "httpx",
    "httpx2",
    "huggingface_hub",
    "requests",
    "tokenizers",
    "torch",
}


def test_a_start_imports_only_what_it_needs(running: Running) -> None:
    """`benchmarks/` has the seconds."""
    child = running(PYTHONPROFILEIMPORTTIME="1")
    lines = [line for line in child.log_file.read_text().splitlines() if line.startswith("import time:")]
    packages = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert "fastapi" in packages
    assert not packages & NOT_AT_THE_START


def test_the_run_file_shows_ports_that_answer_and_goes_with_the_daemon(
    stack: DevStack, running: Running
) -> None:
    child = running()
    assert json.loads((stack.data_dir / RUN_FILE).read_text()) == {
        "pid": child.pid,
        "public_port": stack.public_port,
        "operator_port": stack.operator_port,
    }
    assert child.stop() == DaemonExitCode.OK
    assert not (stack.data_dir / RUN_FILE).exists()


def test_what_it_says_it_listens_on_it_listens_on(stack: DevStack) -> None:
    run_file = stack.data_dir / RUN_FILE
    with spawn(daemon_process(replace(stack, public_port=0, operator_port=0))) as process:
        while not run_file.exists():
            assert process.poll() is None
            time.sleep(0.01)
        ports = json.loads(run_file.read_text())
        assert raw.listens(ports["public_port"])
        assert raw.listens(ports["operator_port"])
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == DaemonExitCode.OK


@pytest.mark.kept("PUBLIC_PORT")
@pytest.mark.parametrize("setting", ["PUBLIC_PORT", "OPERATOR_PORT"])
def test_a_port_in_use_is_named_with_its_setting(setting: str, stack: DevStack, ended: Ending) -> None:
    port = int(stack.settings()[setting])
    with raw.occupied(port):
        done = ended()
    why = f"127.0.0.1:{port} cannot be listened on (Address already in use)"
    assert_ended(done, DaemonExitCode.PORT_IN_USE, why, f"set {setting}")


@each(
    ("settings", "code", "texts"),
    [
        ({"OPERATOR_HOST": "no-such-host.invalid"}, DaemonExitCode.PORT_IN_USE, ("no-such-host.invalid:",)),
        ({"WALLET_NAME": "mistyped"}, DaemonExitCode.CONFIG, ("mistyped/hotkeys/default", "there is no")),
    ],
)
def test_a_setting_that_names_what_is_not_there_is_shown_with_the_way_out(
    settings: dict[str, str], code: int, texts: tuple[str, ...], ended: Ending
) -> None:
    done = ended(OPERATOR_TOKEN="a-token-of-sixteen-letters", **settings)
    assert_ended(done, code, *texts, *settings)


def test_a_second_daemon_on_the_same_folder_is_refused_and_the_first_goes_on(
    stack: DevStack, running: Running, ended: Ending
) -> None:
    first = running()
    public, operator = free_ports(2)
    done = ended(replace(stack, public_port=public, operator_port=operator))
    why = f"{stack.data_dir} is in use by another god-miner (pid {first.pid})"
    assert_ended(done, DaemonExitCode.LOCKED, why, "DATA_DIR")
    assert raw.listens(stack.public_port)
    assert first.stop() == DaemonExitCode.OK


def test_two_daemons_for_one_port_started_together_end_as_one(
    tmp_path: Path, stack: DevStack, running: Running
) -> None:
    """Also while neither answers yet."""
    other = replace(prepare_stack(tmp_path / "other"), public_port=stack.public_port)
    with spawn(daemon_process(stack)) as first, spawn(daemon_process(other)) as second:
        while (codes := [first.poll(), second.poll()]) == [None, None]:
            time.sleep(0.01)
        assert sorted(codes, key=str) == sorted([DaemonExitCode.PORT_IN_USE, None], key=str)
        loser = second if codes[0] is None else first
        _, errors = loser.communicate(timeout=120)
        assert "PUBLIC_PORT" in errors
        assert "Traceback" not in errors


def test_wrong_settings_are_reported_all_at_once(ended: Ending) -> None:
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


def store_of(statement: str) -> bytes:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(statement)
        return connection.serialize()


@pytest.mark.kept("no database", "newer version")
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"not a database at all\n" * 500, ""),
        (b"SQLite format 3\0" + b"\1" * 5000, ""),
        (store_of("CREATE TABLE alembic_version (version_num TEXT)"), ""),
        (None, "run the newer god-miner"),
    ],
    ids=["no database", "damaged", "unreleased version", "newer version"],
)
def test_a_store_that_cannot_be_used_is_refused_and_left_as_it_is(
    content: bytes | None, why: str, stack: DevStack, ended: Ending
) -> None:
    stack.data_dir.mkdir()
    path = stack.data_dir / FILE_NAME
    if content is None:
        prepare_store(stack.data_dir)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA user_version = 9999")
        content = path.read_bytes()
    path.write_bytes(content)
    assert_ended(ended(), DaemonExitCode.CONFIG, str(path), why)
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


@pytest.mark.thorough_rows("run_file_w", "lock_taken")
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
    with spawn(daemon_process(stack)) as process:
        ends = time.monotonic() + 120
        while not (imports(process.pid) if moment is None else moment(stack)):
            assert process.poll() is None
            assert time.monotonic() < ends
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    # Before it can listen to signals it dies of them; from then on it ends in good order.
    assert process.returncode in (DaemonExitCode.OK, -number, 128 + number)
    if moment is not None:
        assert "Traceback" not in errors
    assert not run_file_written(stack)
    assert not raw.listens(stack.public_port)
    # Otherwise the next start is a first one, or one after a usual stop.
    if moment in (lock_taken, store_created):
        assert running().stop() == DaemonExitCode.OK
        with store(stack) as connection:
            assert_whole(connection)


def test_a_locked_hotkey_is_reported_until_the_password_is_right(stack: DevStack, running: Running) -> None:
    keys = stack.keys
    path = hotkey_file(keys.wallet_path, MINER_WALLET, HOTKEY_NAME)
    path.write_bytes(bytes(encrypt_keyfile_data(path.read_bytes(), "the right one")))
    public = json.dumps({"ss58Address": keys.miner.ss58_address})
    path.with_name(f"{path.name}pub.txt").write_text(public)

    def until_open_alerts_are(wanted: list[str]) -> None:
        ends = time.monotonic() + 120
        while open_alerts(stack) != wanted:
            assert time.monotonic() < ends, open_alerts(stack)
            time.sleep(0.1)

    for settings, wanted in (({}, ["hotkey_locked"]), ({"WALLET_PASSWORD": "the right one"}, [])):
        child = running(**settings)
        until_open_alerts_are(wanted)
        child.stop()
    assert "WALLET_PASSWORD" in stack.log_file.read_text()


def open_alerts(stack: DevStack) -> list[str]:
    with store(stack) as connection:
        rows = connection.execute("SELECT rule FROM alerts WHERE resolved_at IS NULL AND rule LIKE 'hotkey%'")
        return [rule for (rule,) in rows]
