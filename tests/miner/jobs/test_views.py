from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from miner.jobs.views import last_log_lines, printable, read_log_chunk, select_attempt
from miner.store.attempts import AttemptRow
from miner.store.jobs import NoSuchJob


def attempt(folder: Path, number: int = 1, ended: bool = False) -> AttemptRow:
    return AttemptRow(
        1, 7, number, "process", "k", None, str(folder), ("0",), 0.0, 1.0, 2.0 if ended else None, None, ""
    )


def test_a_log_is_read_on_from_where_the_last_piece_ended(tmp_path: Path) -> None:
    row = attempt(tmp_path)
    assert read_log_chunk(row, "", 100).text == ""
    (tmp_path / "log").write_text("first\n")
    piece = read_log_chunk(row, "", 100)
    assert (piece.text, piece.ended) == ("first\n", False)
    with (tmp_path / "log").open("a") as file:
        file.write("second\n")
    assert read_log_chunk(row, piece.next, 100).text == "second\n"
    assert read_log_chunk(replace(row, ended_at=1.0), piece.next, 100).ended


def test_the_last_lines_are_whole_and_what_comes_after_follows(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"line {number}\n" for number in range(5000)))
    row = attempt(tmp_path)
    piece = last_log_lines(row, 2)
    assert piece.text == "line 4998\nline 4999\n"
    with (tmp_path / "log").open("a") as file:
        file.write("more\n")
    assert read_log_chunk(row, piece.next, 100).text == "more\n"
    assert last_log_lines(row, 0).text == ""


def test_nothing_in_a_log_steers_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\x1b]0;owned\x07 a\tb\xff\r\n")
    assert read_log_chunk(attempt(tmp_path), "", 100).text == "�]0;owned� a\tb�\r\n"
    assert printable("é ü 😀\n") == "é ü 😀\n"


def test_a_log_that_is_a_link_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to("/etc/passwd")
    assert read_log_chunk(attempt(tmp_path), "", 100).text == ""
    assert last_log_lines(attempt(tmp_path), 10).text == ""


@pytest.mark.parametrize("start", ["x", "1", "1.2.3", "-1.5", "٣.٣"])
def test_a_place_that_makes_no_sense_is_the_beginning(tmp_path: Path, start: str) -> None:
    (tmp_path / "log").write_text("all of it")
    assert read_log_chunk(attempt(tmp_path), start, 100).text == "all of it"


def test_attempts_are_named_by_number_or_the_newest_is_meant(tmp_path: Path) -> None:
    rows = [attempt(tmp_path, number) for number in (1, 2)]
    assert select_attempt(rows, None).number == 2
    assert select_attempt(rows, 1).number == 1
    with pytest.raises(NoSuchJob, match="no attempt 3; its attempts are 1 to 2"):
        select_attempt(rows, 3)
    with pytest.raises(NoSuchJob, match="not been launched"):
        select_attempt([], None)
