from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from core.run_files import Score
from core.wire import MinerSubmission
from miner.jobs.best import Candidate, Published, best_of, identity, refuse, snapshot
from miner.jobs.folder import JobFolder
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason


def model(folder: Path, text: str = "x") -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(text)
    return folder


def test_a_snapshot_is_of_what_lay_there_and_knows_it_again(tmp_path: Path) -> None:
    source, target = model(tmp_path / "attempt_1/submission"), tmp_path / "submission"
    taken = snapshot(source, target)
    assert taken == identity(source)
    assert (target / "model.safetensors").read_text() == "x"


def test_two_snapshots_of_one_job_at_once_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled early upload leaves a thread that still copies; the last upload must not fail for it."""
    source, target, both = model(tmp_path / "a/submission"), tmp_path / "submission", threading.Event()
    link, seen = os.link, []

    def slow(*args: str, **more: bool) -> None:
        seen.append(1)
        if len(seen) == 1:
            assert not both.wait(0.1)
        link(*args, **more)

    monkeypatch.setattr(os, "link", slow)
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(snapshot, source, target) for _ in range(2)]
        assert {one.result() for one in found} == {identity(source)}
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]


def test_a_model_with_a_link_in_it_is_refused(tmp_path: Path) -> None:
    source = model(tmp_path / "a/submission")
    (source / "config.json").symlink_to("/etc/passwd")
    with pytest.raises(StepFailed, match="no links") as caught:
        snapshot(source, tmp_path / "submission")
    assert caught.value.reason is EndReason.BAD_SUBMISSION
    assert not (tmp_path / "submission").exists()


def test_a_full_disk_is_no_fault_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    source = model(tmp_path / "a/submission")
    monkeypatch.setattr(os, "link", full)
    with pytest.raises(StepFailed) as caught:
        snapshot(source, tmp_path / "submission")
    assert caught.value.reason is EndReason.DISK_FULL


def test_what_is_published_is_remembered_until_another_one_takes_its_place(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    source = model(tmp_path / "attempt_1/submission")
    taken, made = snapshot(source, folder.submission), MinerSubmission(repo="me/repo-1")
    Published(taken, 1, Score(value=1.0, step=1), made.repo).save(folder)
    known, candidate = Published.load(folder), Candidate(1, source, None)
    assert known is not None
    assert known.is_of(candidate, made, "repo-1")
    assert not known.is_of(candidate, made, "repo-2")
    refuse(candidate)
    model(source, "y")
    assert not known.is_of(candidate, made, "repo-1")
    folder.published.write_text("[]")
    assert Published.load(folder) is None


def test_a_folder_that_is_a_link_is_no_candidate(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model(tmp_path / "a"))
    assert best_of([Candidate(1, tmp_path / "link", None)]) is None


def test_stripping_takes_refused_and_half_copied_models_too_and_leaves_the_records(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    for name in (
        "submission",
        ".submission.tmp",
        "attempt_1/submission.refused",
        "attempt_1/.submission.old",
    ):
        model(tmp_path / name)
    (tmp_path / "attempt_1/log").write_text("kept")
    folder.strip()
    assert [path.name for path in tmp_path.rglob("*")] == ["attempt_1", "log"]
