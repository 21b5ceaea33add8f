"""A run directory: its records, its log, and how the run ended by them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner.backends.base import EXIT_FILE, START_FILE, STOP_RECORD_FILE, EndCause, RunPhase
from miner.backends.run_folder import (
    BackendEndReport,
    LogPosition,
    current_boot,
    end_status,
    log_tail,
    read_exit,
    read_log,
    read_start,
    read_stop_record,
    write_stop_record,
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "job" / "attempt"
    folder.mkdir(parents=True)
    return folder


def test_what_the_wrapper_writes_is_read(run_dir: Path) -> None:
    (run_dir / START_FILE).write_text('{"at": 5.5, "pid": 7, "boot": "b", "more": 1}')
    (run_dir / EXIT_FILE).write_text(
        '{"at": 6, "code": 137, "signals": ["SIGTERM"], "oom_kills": 2}' + " " * 99
    )
    start, end = read_start(run_dir), read_exit(run_dir)
    assert (start.at, start.pid, start.boot) == (5.5, 7, "b")
    assert (end.code, end.signals, end.oom_kills, end.timeout) == (137, ("SIGTERM",), 2, False)


def test_a_requested_stop_is_recorded(run_dir: Path) -> None:
    assert read_stop_record(run_dir) is None
    write_stop_record(run_dir, force=False)
    write_stop_record(run_dir, force=True)
    record = read_stop_record(run_dir)
    assert record.force


@pytest.mark.parametrize("text", ["", "[]", '{"at": 1, "code": -1}', '{"at": 1e400, "code": 0}'])
def test_a_torn_or_invalid_record_is_ignored(text: str, run_dir: Path) -> None:
    (run_dir / EXIT_FILE).write_text(text)
    assert read_exit(run_dir) is None


@given(
    content=st.binary(max_size=300)
    | st.text(alphabet='{}[]":,0123456789eatcodsignl', max_size=80).map(str.encode)
)
def test_no_content_of_a_record_breaks_its_reader(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        for name, read in (
            (START_FILE, read_start),
            (EXIT_FILE, read_exit),
            (STOP_RECORD_FILE, read_stop_record),
        ):
            (run_dir / name).write_bytes(content)
            record = read(run_dir)
            assert record is None or record.at >= 0


def test_reading_goes_on_where_it_stopped(run_dir: Path) -> None:
    assert read_log(run_dir) == (b"", LogPosition())
    log = run_dir / "log"
    log.write_bytes(b"one\n")
    data, position = read_log(run_dir)
    assert data == b"one\n"
    assert read_log(run_dir, position) == (b"", position)
    with log.open("ab") as file:
        file.write(b"two\nthree\n")
    data, position = read_log(run_dir, position, limit=4)
    assert data == b"two\n"
    assert read_log(run_dir, position)[0] == b"three\n"


def test_a_rotated_log_is_read_from_its_beginning(run_dir: Path) -> None:
    log = run_dir / "log"
    log.write_bytes(b"old\n")
    _, position = read_log(run_dir)
    log.rename(run_dir / "log.first")
    log.write_bytes(b"newer and longer\n")
    data, position = read_log(run_dir, position)
    assert data == b"newer and longer\n"
    log.write_bytes(b"cut\n")
    assert read_log(run_dir, position)[0] == b"cut\n"


def test_the_tail_begins_with_a_whole_line_and_costs_no_more_memory_than_there_is_log(run_dir: Path) -> None:
    assert log_tail(run_dir) == ""
    (run_dir / "log").write_bytes(b"first line\nsecond \xff\nlast\n")
    assert log_tail(run_dir, 12) == "last\n"
    assert log_tail(run_dir) == log_tail(run_dir, 10**15) == "first line\nsecond �\nlast\n"


def put(folder: Path, name: str, **content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


OK = {"code": 0}
SEVEN = {"code": 7}
#: The backend's report; exit record; stop requested; another boot -> why and code.
TABLE: list[tuple[BackendEndReport | None, dict[str, Any] | None, bool, bool, EndCause, int | None]] = [
    (BackendEndReport(0), OK, False, False, EndCause.OK, 0),
    (BackendEndReport(7), SEVEN, False, False, EndCause.FAILED, 7),
    (BackendEndReport(0), {"code": 0, "oom_kills": 1}, False, False, EndCause.OK, 0),
    # Docker's report on memory, and the wrapper's where Docker was down.
    (BackendEndReport(7, oom_killed=True), SEVEN, False, False, EndCause.OOM_KILLED, 7),
    (BackendEndReport(137, oom_killed=True), None, False, False, EndCause.OOM_KILLED, 137),
    (BackendEndReport(137), {"code": 137, "oom_kills": 1}, False, False, EndCause.OOM_KILLED, 137),
    # Its own helper died: Docker does not know the code.
    (BackendEndReport(255), SEVEN, False, False, EndCause.FAILED, 7),
    (BackendEndReport(255), None, False, False, EndCause.KILLED, 255),
    # Requested by us.
    (BackendEndReport(143), {"code": 143, "signals": ["SIGTERM"]}, True, False, EndCause.STOPPED, 143),
    (BackendEndReport(0), {"code": 0, "signals": ["SIGTERM"]}, True, False, EndCause.STOPPED, 0),
    (BackendEndReport(137), None, True, False, EndCause.STOPPED, 137),
    (None, None, True, False, EndCause.STOPPED, None),
    # It was over before the request arrived.
    (BackendEndReport(0), OK, True, False, EndCause.OK, 0),
    # By others.
    (BackendEndReport(0), {"code": 0, "signals": ["SIGTERM"]}, False, False, EndCause.KILLED, 0),
    (BackendEndReport(143), {"code": 143, "signals": ["SIGTERM"]}, False, False, EndCause.KILLED, 143),
    (BackendEndReport(137), None, False, False, EndCause.KILLED, 137),
    (BackendEndReport(137), {"code": 137}, False, False, EndCause.KILLED, 137),
    # By itself.
    (BackendEndReport(139), {"code": 139}, False, False, EndCause.FAILED, 139),
    (BackendEndReport(127), None, False, False, EndCause.FAILED, 127),
    (BackendEndReport(3), {"code": 3, "timeout": True, "signals": []}, False, False, EndCause.TIMEOUT, 3),
    # The backend knows nothing.
    (None, SEVEN, False, False, EndCause.FAILED, 7),
    (None, OK, False, False, EndCause.OK, 0),
    (None, None, False, False, EndCause.LOST, None),
    # The machine went down meanwhile, or after it had ended.
    (None, None, False, True, EndCause.NODE_FAIL, None),
    (BackendEndReport(255), None, False, True, EndCause.NODE_FAIL, 255),
    (None, SEVEN, False, True, EndCause.FAILED, 7),
]


@pytest.mark.parametrize(("report", "record", "stopped", "rebooted", "why", "code"), TABLE)
def test_every_end_has_its_reason(
    report: BackendEndReport | None,
    record: dict[str, Any] | None,
    stopped: bool,
    rebooted: bool,
    why: EndCause,
    code: int | None,
    tmp_path: Path,
) -> None:
    put(tmp_path, START_FILE, at=100.0, pid=1, boot="another" if rebooted else current_boot())
    if record is not None:
        put(tmp_path, EXIT_FILE, at=200.0, **record)
    if stopped:
        put(tmp_path, STOP_RECORD_FILE, at=150.0, force=False)
    status = end_status(tmp_path, report)
    assert (status.why, status.code) == (why, code)
    assert status.phase is (RunPhase.LOST if why is EndCause.LOST else RunPhase.ENDED)
    assert status.started_at == 100.0
    assert status.ended_at == (200.0 if record else None)
    assert bool(status.detail) is (why is not EndCause.OK)


def test_the_backend_s_times_and_message_count_first(tmp_path: Path) -> None:
    put(tmp_path, START_FILE, at=100.0)
    put(tmp_path, EXIT_FILE, at=200.0, code=7)
    status = end_status(tmp_path, BackendEndReport(7, started_at=99.0, ended_at=201.0, detail="from Docker"))
    assert (status.started_at, status.ended_at) == (99.0, 201.0)
    assert status.detail == "exit code 7; from Docker"


def test_before_the_first_start_nothing_is_known(tmp_path: Path) -> None:
    assert end_status(tmp_path).why is EndCause.LOST
    assert end_status(tmp_path / "none").why is EndCause.LOST
