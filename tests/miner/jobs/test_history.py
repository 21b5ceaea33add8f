from __future__ import annotations

import errno
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from core.domain.job_states import EndReason, StepFailed
from core.domain.wire import MinerSubmission
from core.runs.run_files import HeldOutScore
from miner.jobs.folder import JobFolder
from miner.jobs.history import (
    ModelCandidate,
    PublishedModel,
    best_candidate,
    folder_identity,
    put_refused_aside,
    snapshot_best,
)
from tests.doubles.each import each


def model(folder: Path, name: str, text: str = "x") -> Path:
    place = folder / name
    (place / "sub").mkdir(parents=True)
    (place / "weights").write_text(text)
    (place / "sub" / "more").write_text(text)
    return place


def candidate(folder: Path, attempt: int, value: float | None, metric: str = "eval_loss") -> ModelCandidate:
    score = None if value is None else HeldOutScore(value=value, step=1, metric=metric)
    return ModelCandidate(attempt, model(folder, f"m{attempt}"), score)


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ((0.5, 0.4, 0.9), 2),
        ((0.5, None, None), 1),
        ((None, None), 2),
    ],
)
def test_the_best_score_wins_then_any_score_then_the_later_attempt(
    tmp_path: Path, scores: tuple[float | None, ...], best: int
) -> None:
    winner = best_candidate([candidate(tmp_path, number, score) for number, score in enumerate(scores, 1)])
    assert winner.attempt == best


def test_scores_of_different_kinds_are_not_compared(tmp_path: Path) -> None:
    loss, reward = candidate(tmp_path, 1, 0.1), candidate(tmp_path, 2, 0.9, metric="reward")
    assert best_candidate([loss, reward]) == reward


def test_what_is_not_there_is_no_candidate(tmp_path: Path) -> None:
    gone = ModelCandidate(1, tmp_path / "gone", None)
    linked = tmp_path / "linked"
    linked.symlink_to(model(tmp_path, "real"))
    assert best_candidate([gone, ModelCandidate(2, linked, None)]) is None


def test_a_snapshot_holds_the_same_files_without_copying_them(tmp_path: Path) -> None:
    source, target = model(tmp_path, "source"), tmp_path / "target"
    model(tmp_path, "target", "old")
    assert snapshot_best(source, target) == folder_identity(source)
    assert (target / "weights").read_text() == "x"
    assert (target / "sub" / "more").read_text() == "x"
    assert os.stat(target / "weights").st_ino == os.stat(source / "weights").st_ino
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


@pytest.mark.parametrize("kind", ["link", "linked folder", "pipe"])
def test_what_is_no_plain_file_makes_a_model_unsound(tmp_path: Path, kind: str) -> None:
    source = model(tmp_path, "source")
    if kind == "pipe":
        os.mkfifo(source / "odd")
    else:
        (source / "odd").symlink_to("/etc/passwd" if kind == "link" else "/etc")
    with pytest.raises(StepFailed, match=r"odd has mode .*no links") as failed:
        snapshot_best(source, tmp_path / "target")
    assert failed.value.reason is EndReason.BAD_SUBMISSION
    assert not (tmp_path / "target").exists()


def test_a_model_that_is_replaced_while_it_is_read_is_never_mixed(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for name in ("a", "b"):
        place = tmp_path / name
        place.mkdir()
        for number in range(40):
            (place / str(number)).write_text(name)
    (tmp_path / "a").rename(source)
    done = threading.Event()

    def swap() -> None:
        aside = tmp_path / "b"
        while not done.is_set():
            source.rename(tmp_path / "c")
            aside.rename(source)
            (tmp_path / "c").rename(aside)

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for _ in range(20):
            try:
                snapshot_best(source, target)
            except StepFailed:
                continue
            assert len({file.read_text() for file in target.iterdir()}) == 1
    finally:
        done.set()
        swapping.join()


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSPC])
def test_where_links_are_not_to_be_had_files_are_copied_unless_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "link", fails)
    source, target = model(tmp_path, "source"), tmp_path / "target"
    if error == errno.EPERM:
        snapshot_best(source, target)
        assert (target / "weights").read_text() == "x"
    else:
        with pytest.raises(StepFailed) as failed:
            snapshot_best(source, target)
        assert failed.value.reason is EndReason.DISK_FULL


def test_what_is_published_is_known_by_its_folder_its_name_and_its_hash(tmp_path: Path) -> None:
    best, folder = candidate(tmp_path, 1, 0.5), JobFolder(tmp_path)
    identity = folder_identity(best.folder)
    assert identity is not None
    submission = MinerSubmission(repo="me/repo", model_hash="0" * 64)
    published = PublishedModel(identity, 1, best.score, "me/repo", submission.model_hash)
    published.save(folder)
    assert PublishedModel.load(folder) == published
    assert published.is_of(best, submission, "repo")
    assert not published.is_of(best, submission, "other")
    replaced = MinerSubmission(repo="me/repo", model_hash="1" * 64)
    for other in (None, MinerSubmission(repo="me/repo"), replaced):
        assert not published.is_of(best, other, "repo")
    (best.folder / "new").write_text("x")
    assert not published.is_of(best, submission, "repo")


def test_a_note_without_a_hash_still_has_the_score_and_the_model_is_published_again(tmp_path: Path) -> None:
    best, folder = candidate(tmp_path, 1, 0.5), JobFolder(tmp_path)
    identity = folder_identity(best.folder)
    assert identity is not None
    PublishedModel(identity, 1, best.score, "me/repo", "0" * 64).save(folder)
    content = json.loads(folder.published.read_text())
    del content["model_hash"]
    folder.published.write_text(json.dumps(content))
    published = PublishedModel.load(folder)
    assert published.score == best.score
    assert not published.is_of(best, MinerSubmission(repo="me/repo", model_hash="0" * 64), "repo")


@each("text", ["", "[]", "{}", '{"identity": [1]}', "null", '{"identity": 3, "score": null}'])
def test_a_note_that_makes_no_sense_is_none(tmp_path: Path, text: str) -> None:
    folder = JobFolder(tmp_path)
    folder.published.write_text(text)
    assert PublishedModel.load(folder) is None


def test_a_refused_model_is_put_aside_and_no_candidate_any_more(tmp_path: Path) -> None:
    refused = candidate(tmp_path, 1, 0.5)
    put_refused_aside(refused)
    assert best_candidate([refused]) is None
    assert (tmp_path / "submission.refused" / "weights").exists()


def test_two_snapshots_of_one_job_at_once_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled early upload leaves a thread that still copies; the last upload must not fail for it."""
    source, target, over = model(tmp_path, "source"), tmp_path / "target", threading.Event()
    link, seen = os.link, []

    def slow(*args: str, **more: bool) -> None:
        seen.append(1)
        if len(seen) == 1:
            over.wait(0.1)
        link(*args, **more)

    monkeypatch.setattr(os, "link", slow)
    with ThreadPoolExecutor(2) as pool:
        snapshots = [pool.submit(snapshot_best, source, target) for _ in range(2)]
        assert {snapshot.result() for snapshot in snapshots} == {folder_identity(source)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]
