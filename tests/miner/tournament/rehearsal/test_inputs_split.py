"""What is trained on and what is kept for the score."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from miner.tournament.rehearsal.cache_layout import BadInput
from miner.tournament.rehearsal.inputs import (
    PICTURES,
    split_pictures,
    split_rows,
    stand_in_pictures,
    training_data,
)
from miner.tournament.rehearsal.options import RehearsalInputs
from miner.tournament.rehearsal.scoring import pictures_in
from miner.tournament.rules import TASKS


@pytest.mark.parametrize(("count", "kept"), [(2, 1), (10, 1), (11, 2), (21, 3)])
def test_a_tenth_of_the_pictures_is_kept_for_the_score_with_their_captions(
    tmp_path: Path, count: int, kept: int
) -> None:
    source = tmp_path / "given.zip"
    source.write_bytes(stand_in_pictures(count, 64, 64))
    train, test = split_pictures(source, tmp_path)
    with zipfile.ZipFile(source) as given, zipfile.ZipFile(train) as rest:
        left = set(rest.namelist())
        assert len(left) == 2 * (count - kept)
        assert all(rest.read(name) == given.read(name) for name in left)
        others = {given.read(name) for name in set(given.namelist()) - left}
    held = pictures_in(test)
    assert len(held) == kept
    assert {data for path, caption in held for data in (path.read_bytes(), caption.encode())} == others


def test_pictures_may_lie_in_a_folder_and_lack_captions(tmp_path: Path) -> None:
    source = tmp_path / "given.zip"
    with zipfile.ZipFile(tmp_path / "given.zip", "w") as archive:
        made = tmp_path / "made.zip"
        made.write_bytes(stand_in_pictures(4, 64, 64))
        for number in range(1, 5):
            archive.writestr(f"some folder/{number}.PNG", zipfile.ZipFile(made).read(f"{number}.png"))
    train, test = split_pictures(source, tmp_path)
    assert [(path.name, caption) for path, caption in pictures_in(test)] == [("1.png", "")]
    assert len(zipfile.ZipFile(train).namelist()) == 3


def test_one_picture_is_too_few(tmp_path: Path) -> None:
    source = tmp_path / "given.zip"
    source.write_bytes(stand_in_pictures(1, 64, 64))
    with pytest.raises(BadInput, match="1 picture, which validators would keep"):
        split_pictures(source, tmp_path)


def test_one_row_is_too_few(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"text": "1"}]', encoding="utf-8")
    with pytest.raises(BadInput, match="1 row, which is kept for the score"):
        split_rows(path)


def test_made_up_pictures_are_kept_back_too(tmp_path: Path) -> None:
    train, test = training_data(TASKS["krea2"], RehearsalInputs(), tmp_path)
    assert len(zipfile.ZipFile(train).namelist()) // 2 + len(pictures_in(test)) == PICTURES


def test_a_tenth_of_the_rows_is_kept_for_the_score(tmp_path: Path) -> None:
    rows = [{"text": str(number)} for number in range(30)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    train, test = split_rows(path)
    assert (len(train), len(test)) == (27, 3)
    assert sorted((*train, *test), key=str) == sorted(rows, key=str)
