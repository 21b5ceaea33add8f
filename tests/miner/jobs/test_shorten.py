from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from miner.jobs.shorten import shorten


def test_a_long_log_keeps_its_two_ends_in_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = [f"line {number}\n" for number in range(10_000)]
    log.write_text("".join(lines))
    before = log.stat().st_size
    freed = shorten(log, mark=True, most=4000)
    left = log.read_text().splitlines(keepends=True)
    assert freed == before - log.stat().st_size
    assert log.stat().st_size < 4100
    at = next(place for place, line in enumerate(left) if "bytes were removed here" in line)
    assert left[:at] == lines[:at]
    assert left[at + 1 :] == lines[-len(left[at + 1 :]) :]
    assert len(left[at + 1 :]) > at > 50
    assert shorten(log, mark=True, most=5000) == 0


def test_events_stay_a_file_of_events(tmp_path: Path) -> None:
    file = tmp_path / "progress.jsonl"
    file.write_text('{"kind": "step"}\n' * 1000)
    shorten(file, mark=False, most=1000)
    assert set(file.read_text().splitlines()) == {'{"kind": "step"}'}


def test_links_pipes_and_what_is_not_there_are_left_alone(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x" * 5000)
    (tmp_path / "log").symlink_to(secret)
    os.mkfifo(tmp_path / "pipe")
    for name in ("log", "pipe", "none"):
        assert shorten(tmp_path / name, mark=True, most=100) == 0
    assert secret.stat().st_size == 5000


@given(st.binary(max_size=3000), st.integers(8, 400))
def test_nothing_is_invented(text: bytes, most: int) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "log"
        file.write_bytes(text)
        freed = shorten(file, mark=False, most=most)
        left = file.read_bytes()
        assert len(left) == len(text) - freed
        assert len(left) <= max(most, len(text) if len(text) <= most else 0)
        assert any(text.startswith(left[:cut]) and text.endswith(left[cut:]) for cut in range(len(left) + 1))
