"""The log, read while it grows and is turned over."""

from __future__ import annotations

from pathlib import Path

from miner.engines.logs import Place, log_tail, read_log


def folder(tmp_path: Path) -> Path:
    made = tmp_path / "job" / "attempt"
    made.mkdir(parents=True)
    return made


def test_reading_goes_on_where_it_stopped(tmp_path: Path) -> None:
    run_dir = folder(tmp_path)
    assert read_log(run_dir) == (b"", Place())
    log = run_dir / "log"
    log.write_bytes(b"one\n")
    data, place = read_log(run_dir)
    assert data == b"one\n"
    assert read_log(run_dir, place) == (b"", place)
    with log.open("ab") as file:
        file.write(b"two\nthree\n")
    data, place = read_log(run_dir, place, limit=4)
    assert data == b"two\n"
    assert read_log(run_dir, place)[0] == b"three\n"


def test_a_log_that_was_turned_over_is_read_from_its_beginning(tmp_path: Path) -> None:
    run_dir = folder(tmp_path)
    log = run_dir / "log"
    log.write_bytes(b"old\n")
    _, place = read_log(run_dir)
    log.rename(run_dir / "log.first")
    log.write_bytes(b"newer and longer\n")
    data, place = read_log(run_dir, place)
    assert data == b"newer and longer\n"
    log.write_bytes(b"cut\n")
    assert read_log(run_dir, place)[0] == b"cut\n"


def test_the_tail_begins_with_a_whole_line(tmp_path: Path) -> None:
    run_dir = folder(tmp_path)
    assert log_tail(run_dir) == ""
    (run_dir / "log").write_bytes(b"first line\nsecond \xff\nlast\n")
    assert log_tail(run_dir, 12) == "last\n"
    assert log_tail(run_dir) == "first line\nsecond �\nlast\n"


def test_more_of_a_log_than_there_is_costs_no_memory(tmp_path: Path) -> None:
    run_dir = folder(tmp_path)
    (run_dir / "log").write_bytes(b"all\n")
    assert log_tail(run_dir, 10**15) == "all\n"
