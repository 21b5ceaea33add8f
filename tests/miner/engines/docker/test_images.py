"""Names and pins of images."""

from __future__ import annotations

from pathlib import Path

import pytest

from miner.engines.docker.images import KINDS, PINS_FILE, Images, UnknownImage
from miner.settings import Settings, load_settings


def settings(tmp_path: Path, **more: str) -> Settings:
    return load_settings(env={}, env_file=None, data_dir=tmp_path, **more)


def test_without_a_pin_the_name_runs(tmp_path: Path) -> None:
    images = Images(settings(tmp_path, trainer_text_image="mine:1"))
    assert images.reference("text") == "mine:1"
    assert images.pin("text") is None


def test_what_was_built_runs_by_its_id_until_another_is_named(tmp_path: Path) -> None:
    images = Images(settings(tmp_path))
    images.set_pin("text", "sha256:aaa", "source")
    images.set_pin("image", "sha256:bbb", "source")
    assert images.reference("text") == "sha256:aaa"
    assert Images(settings(tmp_path)).reference("image") == "sha256:bbb"
    assert Images(settings(tmp_path, trainer_text_image="another:2")).reference("text") == "another:2"
    images.set_pin("text", "sha256:ccc", "source")
    assert images.reference("text") == "sha256:ccc"


def test_an_unknown_image_is_told_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UnknownImage, match="text, image, toolkit"):
        Images(settings(tmp_path)).reference("other")


@pytest.mark.parametrize("content", ["", "[]", '{"text": {}}', '{"text": 1}'])
def test_a_damaged_file_of_pins_is_told_and_not_passed_over(content: str, tmp_path: Path) -> None:
    """Otherwise whatever the name means today would run."""
    (tmp_path / PINS_FILE).write_text(content)
    with pytest.raises(UnknownImage, match="delete it"):
        Images(settings(tmp_path)).reference("text")


def test_every_kind_has_a_setting() -> None:
    assert {kind.setting for kind in KINDS.values()} <= set(Settings.model_fields)
