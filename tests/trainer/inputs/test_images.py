"""Zips of pictures as the folders that the image engines read."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from core.domain.tasks import ImageModelType, TaskType
from core.runs.run_files import RunSpec
from tests.doubles.each import each
from tests.trainer.run_specs import run_spec
from tests.trainer.runner.pictures import picture_zip
from trainer.errors import BadData
from trainer.inputs.images import folder_name, prepare_images


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    path = picture_zip(tmp_path / "task.zip", pictures=3)
    image = {"task_type": TaskType.IMAGE, "image_type": ImageModelType.FLUX}
    return run_spec(tmp_path, data_path=str(path), trigger_word="tok_x", **image)


def test_pictures_lie_in_a_folder_that_says_how_often_they_come(spec: RunSpec, tmp_path: Path) -> None:
    images = prepare_images(spec, tmp_path / "w", repeats=10)
    assert images.folder.name == "10_tok_x"
    assert images.folder.parent == images.parent
    assert sorted(file.suffix for file in images.folder.iterdir()) == [".png"] * 3 + [".txt"] * 3
    assert (images.facts.rows, images.facts.image_repeats) == (3, 10)


def test_preparing_twice_gives_the_same_and_leaves_the_zip_alone(spec: RunSpec, tmp_path: Path) -> None:
    before = Path(spec.data_path).read_bytes()
    first = prepare_images(spec, tmp_path / "w")
    contents = {file.name: file.read_bytes() for file in first.folder.iterdir()}
    assert prepare_images(spec, tmp_path / "w") == first
    assert {file.name: file.read_bytes() for file in first.folder.iterdir()} == contents
    assert Path(spec.data_path).read_bytes() == before


@pytest.mark.parametrize("files", [{}, {"readme.txt": b"x"}, {"a.png": b"no picture"}, None, b"PK no zip"])
def test_a_zip_without_pictures_is_bad_data(
    spec: RunSpec, tmp_path: Path, files: dict[str, bytes] | bytes | None
) -> None:
    path = Path(spec.data_path)
    path.unlink()
    if isinstance(files, bytes):
        path.write_bytes(files)
    elif files is not None:
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
    with pytest.raises(BadData, match=r"task\.zip"):
        prepare_images(spec, tmp_path / "w")
    assert not list((tmp_path / "w").glob("*")), "nothing half done is left"


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
