"""Zips of pictures as the folders that the image engines read."""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path

import pytest

from core.domain.tasks import ImageModelType, TaskType
from core.runs.run_files import RunSpec
from tests.doubles.each import each
from tests.trainer.run_specs import run_spec
from trainer.errors import BadData
from trainer.inputs.images import folder_name, prepare_images


def png(side: int = 64) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pixels = zlib.compress(b"".join(b"\0" + bytes(3 * side) for _ in range(side)))
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def task(folder: Path, files: dict[str, bytes], **more: str) -> RunSpec:
    path = folder / "task.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    image = {"task_type": TaskType.IMAGE, "image_type": ImageModelType.FLUX}
    return run_spec(folder, data_path=str(path), **image, **more)


def pictures(count: int) -> dict[str, bytes]:
    made: dict[str, bytes] = {}
    for number in range(count):
        made[f"train_data/{number}.png"] = png()
        made[f"train_data/{number}.txt"] = f"picture {number}".encode()
    return made


def test_pictures_lie_in_a_folder_that_says_how_often_they_come(tmp_path: Path) -> None:
    found = prepare_images(task(tmp_path, pictures(3), trigger_word="tok_x"), tmp_path / "w", repeats=10)
    assert found.folder.name == "10_tok_x"
    assert found.folder.parent == found.parent
    assert sorted(file.suffix for file in found.folder.iterdir()) == [".png"] * 3 + [".txt"] * 3
    assert (found.facts.rows, found.facts.image_repeats) == (3, 10)


def test_preparing_twice_gives_the_same_and_leaves_the_zip_alone(tmp_path: Path) -> None:
    spec = task(tmp_path, pictures(4))
    before = Path(spec.data_path).read_bytes()
    first = prepare_images(spec, tmp_path / "w", dropout=0.5)
    contents = {file.name: file.read_bytes() for file in first.folder.iterdir()}
    again = prepare_images(spec, tmp_path / "w", dropout=0.5)
    assert again.folder == first.folder
    assert {file.name: file.read_bytes() for file in again.folder.iterdir()} == contents
    assert Path(spec.data_path).read_bytes() == before


@pytest.mark.parametrize(("dropout", "empty"), [(0.0, 0), (0.5, 5), (1.0, 10)])
def test_captions_can_be_left_out_of_some_pictures(tmp_path: Path, dropout: float, empty: int) -> None:
    found = prepare_images(task(tmp_path, pictures(10)), tmp_path / "w", dropout=dropout)
    texts = [file.read_text() for file in found.folder.glob("*.txt")]
    assert sum(1 for text in texts if not text.strip()) == empty
    assert all(texts), "an empty file ends sd-scripts"


def test_one_picture_is_enough(tmp_path: Path) -> None:
    assert prepare_images(task(tmp_path, pictures(1)), tmp_path / "w").facts.rows == 1


@pytest.mark.parametrize("files", [{}, {"readme.txt": b"x"}, {"a.png": b"no picture"}])
def test_a_zip_without_pictures_is_bad_data(tmp_path: Path, files: dict[str, bytes]) -> None:
    with pytest.raises(BadData, match=r"task\.zip"):
        prepare_images(task(tmp_path, files), tmp_path / "w")
    assert not list((tmp_path / "w").glob("*")), "nothing half done is left"


def test_a_zip_that_is_not_there_is_bad_data_too(tmp_path: Path) -> None:
    spec = task(tmp_path, pictures(1))
    Path(spec.data_path).unlink()
    with pytest.raises(BadData, match="not there"):
        prepare_images(spec, tmp_path / "w")


def test_what_is_no_zip_is_bad_data(tmp_path: Path) -> None:
    spec = task(tmp_path, pictures(1))
    Path(spec.data_path).write_bytes(b"PK no zip")
    with pytest.raises(BadData):
        prepare_images(spec, tmp_path / "w")


@each(
    ("trigger", "name"),
    [
        (None, "3_lora style"),
        ("tok", "3_tok"),
        ("../../etc", "3_etc"),
        ("a/b", "3_a b"),
        ("...", "3_lora style"),
    ],
)
def test_a_folders_name_is_harmless(trigger: str | None, name: str) -> None:
    assert folder_name(3, trigger) == name
