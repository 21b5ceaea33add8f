"""Notes in a run folder, from whoever they are."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner.engines.base import ASKED_FILE, EXIT_FILE, START_FILE
from miner.engines.records import read_asked, read_exit, read_start, write_asked


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    made = tmp_path / "job" / "attempt"
    made.mkdir(parents=True)
    return made


def test_what_the_wrapper_writes_is_read(run_dir: Path) -> None:
    (run_dir / START_FILE).write_text('{"at": 5.5, "pid": 7, "boot": "b", "more": 1}')
    (run_dir / EXIT_FILE).write_text(
        '{"at": 6, "code": 137, "signals": ["SIGTERM"], "oom_kills": 2}' + " " * 99
    )
    start, end = read_start(run_dir), read_exit(run_dir)
    assert start is not None
    assert (start.at, start.pid, start.boot) == (5.5, 7, "b")
    assert end is not None
    assert (end.code, end.signals, end.oom_kills, end.timeout) == (137, ("SIGTERM",), 2, False)


def test_that_it_was_asked_to_end_is_kept(run_dir: Path) -> None:
    assert read_asked(run_dir) is None
    write_asked(run_dir, force=False)
    write_asked(run_dir, force=True)
    asked = read_asked(run_dir)
    assert asked is not None
    assert asked.force


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "{",
        "[]",
        "null",
        '{"at": 1}',
        '{"at": 1, "code": -1}',
        '{"at": 1e400, "code": 0}',
        "\0" * 512,
    ],
)
def test_a_torn_or_wrong_note_is_none(text: str, run_dir: Path) -> None:
    (run_dir / EXIT_FILE).write_text(text)
    assert read_exit(run_dir) is None


@given(
    content=st.binary(max_size=300)
    | st.text(alphabet='{}[]":,0123456789eatcodsignl', max_size=80).map(str.encode)
)
def test_no_content_of_a_note_breaks_its_reader(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        for name, read in ((START_FILE, read_start), (EXIT_FILE, read_exit), (ASKED_FILE, read_asked)):
            (run_dir / name).write_bytes(content)
            found = read(run_dir)
            assert found is None or found.at >= 0
