"""Pictures as they come, their split, and their order."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.trainer.pictures.little import write_pictures
from trainer.errors import BadData
from trainer.pictures.dataset import read_pictures, split, training_cases
from trainer.pictures.stack import TrainedPicture

pytestmark = pytest.mark.small


def read(folder: Path) -> tuple[list[str], str]:
    notes: list[str] = []
    names = [picture.name for picture in read_pictures(folder, lambda kind, text: notes.append(text))]
    return names, "\n".join(notes)


def test_captions_are_taken_as_they_are(tmp_path: Path) -> None:
    pictures = read_pictures(write_pictures(tmp_path, 1), lambda kind, text: None)
    assert pictures[0].caption == "a red thing, number 0\n"


def test_what_cannot_be_used_is_left_out_and_named(tmp_path: Path) -> None:
    write_pictures(tmp_path, 2)
    (tmp_path / "broken.png").write_bytes((tmp_path / "00.png").read_bytes()[:200])
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.webp").write_text("no picture")
    Image.new("RGB", (1, 3000)).save(tmp_path / "strip.png")
    (tmp_path / "copy.png").write_bytes((tmp_path / "00.png").read_bytes())
    names, notes = read(tmp_path)
    assert names == ["00.png", "01.png"]
    for name in ("broken.png", "empty.jpg", "text.webp", "strip.png", "copy.png"):
        assert f"{name} is left out" in notes


def test_one_pixel_and_forty_megapixels_are_pictures(tmp_path: Path) -> None:
    Image.new("RGB", (1, 1), (9, 9, 9)).save(tmp_path / "small.png")
    Image.new("RGB", (8000, 5000), (1, 2, 3)).save(tmp_path / "large.jpg")
    assert read(tmp_path)[0] == ["large.jpg", "small.png"]


def test_a_missing_or_blank_caption_is_the_empty_text(tmp_path: Path) -> None:
    write_pictures(tmp_path, 3)
    (tmp_path / "00.txt").unlink()
    (tmp_path / "01.txt").write_text(" \n")
    pictures = read_pictures(tmp_path, lambda kind, text: None)
    assert [picture.caption for picture in pictures] == ["", "", "a red thing, number 2\n"]
    assert "2 of 3 have no caption" in read(tmp_path)[1]


def test_a_folder_without_pictures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="no picture"):
        read(tmp_path)


def picture(name: str, caption: str = "text") -> TrainedPicture:
    return TrainedPicture(name, name, caption, torch.zeros(1), torch.zeros(1))


def test_the_split_goes_by_content_and_holds_out_captioned_ones() -> None:
    pictures = [picture(name, "" if name in "abc" else "text") for name in "fedcba"]
    held_out = {item.name for item in split(pictures, 0.1, 3).held_out}
    assert held_out == {"d", "e"}
    assert {item.name for item in split(pictures[::-1], 0.1, 3).held_out} == held_out


def test_each_picture_comes_once_a_pass_in_each_band_and_with_both_texts_in_two() -> None:
    pictures = [picture("a"), picture("b"), picture("c")]
    cases = training_cases(pictures, seed=4)
    first, second = (list(islice(cases, 48)) for _ in range(2))
    for each in (first, second):
        assert Counter((case.picture.name, case.band) for case in each) == Counter(
            (name, band) for name in "abc" for band in range(16)
        )
        assert sum(bool(case.text) for case in each) == 24
    both = Counter((case.picture.name, case.band, case.text) for case in first + second)
    assert len(both) == 96
    assert [case.band for case in first] != [case.band for case in second]
