from __future__ import annotations

from pathlib import Path

import pytest

from core.run_files import Score
from core.wire import MinerSubmission
from miner.jobs.best import Candidate, Published, best_of, identity, refuse
from miner.jobs.folder import JobFolder


def model(folder: Path, name: str, text: str = "x") -> Path:
    place = folder / name
    (place / "sub").mkdir(parents=True)
    (place / "weights").write_text(text)
    (place / "sub" / "more").write_text(text)
    return place


def candidate(folder: Path, attempt: int, value: float | None, metric: str = "eval_loss") -> Candidate:
    score = None if value is None else Score(value=value, step=1, metric=metric)
    return Candidate(attempt, model(folder, f"m{attempt}"), score)


def test_the_best_score_wins_whichever_attempt_it_is(tmp_path: Path) -> None:
    made = [candidate(tmp_path, number, value) for number, value in ((1, 0.5), (2, 0.4), (3, 0.9))]
    best = best_of(made)
    assert best is not None
    assert best.attempt == 2


def test_a_model_with_a_score_beats_one_without_and_a_later_one_an_earlier(tmp_path: Path) -> None:
    scored, plain, later = (candidate(tmp_path, n, v) for n, v in ((1, 0.5), (2, None), (3, None)))
    assert best_of([scored, plain, later]) == scored
    assert best_of([plain, later]) == later


def test_scores_of_different_kinds_are_not_compared(tmp_path: Path) -> None:
    one, other = candidate(tmp_path, 1, 0.1), candidate(tmp_path, 2, 0.9, metric="reward")
    assert best_of([one, other]) == other


def test_what_is_not_there_is_no_candidate(tmp_path: Path) -> None:
    gone = Candidate(1, tmp_path / "gone", None)
    linked = tmp_path / "linked"
    linked.symlink_to(model(tmp_path, "real"))
    assert best_of([gone, Candidate(2, linked, None)]) is None


def test_what_is_published_is_known_by_its_folder_and_its_name(tmp_path: Path) -> None:
    one = candidate(tmp_path, 1, 0.5)
    known = identity(one.folder)
    assert known is not None
    folder = JobFolder(tmp_path)
    Published(known, 1, one.score, "me/repo").save(folder)
    told = Published.load(folder)
    assert told == Published(known, 1, one.score, "me/repo")
    made = MinerSubmission(repo="me/repo")
    assert told.is_of(one, made, "repo")
    assert not told.is_of(one, made, "other")
    assert not told.is_of(one, None, "repo")
    (one.folder / "new").write_text("x")
    assert not told.is_of(one, made, "repo")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"identity": [1]}', "null", '{"identity": 3, "score": null}']
)
def test_a_note_that_makes_no_sense_is_none(tmp_path: Path, text: str) -> None:
    folder = JobFolder(tmp_path)
    folder.published.write_text(text)
    assert Published.load(folder) is None


def test_a_refused_model_is_put_aside_and_no_candidate_any_more(tmp_path: Path) -> None:
    one = candidate(tmp_path, 1, 0.5)
    refuse(one)
    assert best_of([one]) is None
    assert (tmp_path / "submission.refused" / "weights").exists()
