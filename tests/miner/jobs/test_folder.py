from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from miner.jobs.folder import JobFolder, job_folder, shorten_log


def filled(folder: JobFolder) -> JobFolder:
    """Two attempts, what is published, and what a kill or a refusal has left of models."""
    for number in (1, 2):
        attempt = folder.attempt(number)
        attempt.create()
        for path in (attempt.log, attempt.plan, attempt.work / "checkpoint"):
            path.write_bytes(b"x" * 1000)
    submissions = (
        "submission",
        ".submission.tmp",
        "attempt_1/submission.refused",
        "attempt_2/.submission.old",
    )
    for name in ("inputs", "attempt_1/submission", *submissions):
        (folder.path / name).mkdir()
        (folder.path / name / "large").write_bytes(b"x" * 1000)
    return folder


def test_stripping_leaves_what_is_asked_for_later(tmp_path: Path) -> None:
    folder = filled(job_folder(tmp_path, 7))
    assert folder.strip() == 8 * 1000
    left = sorted(str(path.relative_to(folder.path)) for path in folder.path.rglob("*") if path.is_file())
    assert left == ["attempt_1/log", "attempt_1/plan.json", "attempt_2/log", "attempt_2/plan.json"]
    assert folder.strip() == 0


def test_latest_points_at_the_newest_attempt(tmp_path: Path) -> None:
    folder = filled(job_folder(tmp_path, 7))
    for number in (1, 2):
        folder.point_latest(number)
        assert folder.latest.resolve() == folder.attempt(number).path


def test_what_the_daemon_goes_by_lies_outside_of_what_a_training_can_write(tmp_path: Path) -> None:
    attempt = job_folder(tmp_path, 7).attempt(1)
    assert not attempt.given_run.is_relative_to(attempt.path)
    assert not attempt.given_plan.is_relative_to(attempt.path)


def test_a_long_log_keeps_its_two_ends_in_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = [f"line {number}\n" for number in range(10_000)]
    log.write_text("".join(lines))
    before = log.stat().st_size
    freed = shorten_log(log, mark=True, most=4000)
    left = log.read_text().splitlines(keepends=True)
    assert freed == before - log.stat().st_size
    assert log.stat().st_size < 4100
    at = next(place for place, line in enumerate(left) if "bytes were removed here" in line)
    assert left[:at] == lines[:at]
    assert left[at + 1 :] == lines[-len(left[at + 1 :]) :]
    assert len(left[at + 1 :]) > at > 50
    assert shorten_log(log, mark=True, most=5000) == 0


def test_events_stay_a_file_of_events(tmp_path: Path) -> None:
    file = tmp_path / "progress.jsonl"
    file.write_text('{"kind": "step"}\n' * 1000)
    shorten_log(file, mark=False, most=1000)
    assert set(file.read_text().splitlines()) == {'{"kind": "step"}'}


def test_links_pipes_and_what_is_not_there_are_left_alone(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x" * 5000)
    (tmp_path / "log").symlink_to(secret)
    os.mkfifo(tmp_path / "pipe")
    for name in ("log", "pipe", "none"):
        assert shorten_log(tmp_path / name, mark=True, most=100) == 0
    assert secret.stat().st_size == 5000


@given(st.binary(max_size=3000), st.integers(8, 400))
def test_nothing_is_invented(text: bytes, most: int) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "log"
        file.write_bytes(text)
        freed = shorten_log(file, mark=False, most=most)
        left = file.read_bytes()
        assert len(left) == len(text) - freed
        assert len(left) <= max(most, len(text) if len(text) <= most else 0)
        assert any(text.startswith(left[:cut]) and text.endswith(left[cut:]) for cut in range(len(left) + 1))
