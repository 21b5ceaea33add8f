from __future__ import annotations

from pathlib import Path

from miner.jobs.folder import JobFolder, job_folder, write


def filled(folder: JobFolder) -> JobFolder:
    for number in (1, 2):
        attempt = folder.attempt(number)
        attempt.make()
        attempt.submission.mkdir()
        for place in (attempt.log, attempt.plan, attempt.work / "checkpoint", attempt.submission / "weights"):
            place.write_bytes(b"x" * 1000)
    for place in (folder.inputs, folder.submission):
        place.mkdir()
        (place / "large").write_bytes(b"x" * 1000)
    return folder


def test_stripping_leaves_what_is_asked_for_later(tmp_path: Path) -> None:
    folder = filled(job_folder(tmp_path, 7))
    assert folder.strip() == 6 * 1000
    left = sorted(str(one.relative_to(folder.path)) for one in folder.path.rglob("*") if one.is_file())
    assert left == ["attempt_1/log", "attempt_1/plan.json", "attempt_2/log", "attempt_2/plan.json"]
    assert folder.strip() == 0


def test_latest_points_at_the_newest_attempt(tmp_path: Path) -> None:
    folder = filled(job_folder(tmp_path, 7))
    for number in (1, 2):
        folder.point_latest(number)
        assert folder.latest.resolve() == folder.attempt(number).path


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    write(tmp_path / "run.json", "first")
    write(tmp_path / "run.json", "second")
    assert [one.name for one in tmp_path.iterdir()] == ["run.json"]
    assert (tmp_path / "run.json").read_text() == "second"


def test_what_the_daemon_goes_by_lies_outside_of_what_a_training_can_write(tmp_path: Path) -> None:
    attempt = job_folder(tmp_path, 7).attempt(1)
    assert not attempt.told_run.is_relative_to(attempt.path)
    assert not attempt.told_plan.is_relative_to(attempt.path)
