"""Names, pins, sources and failed builds of images."""

from __future__ import annotations

from pathlib import Path

import pytest

from miner.backends.docker.images import (
    IMAGE_KINDS,
    PINS_FILE,
    BuildFailed,
    TrainerImages,
    UnknownImage,
    _follow_build,
    source_hash,
)
from miner.settings import Settings, load_settings


def settings(tmp_path: Path, **more: str) -> Settings:
    return load_settings(env={}, env_file=None, data_dir=tmp_path, **more)


def test_without_a_pin_the_name_runs(tmp_path: Path) -> None:
    images = TrainerImages(settings(tmp_path, trainer_text_image="mine:1"))
    assert images.reference("text") == "mine:1"
    assert images.pin("text") is None


def test_what_was_built_runs_by_its_id_until_another_is_named(tmp_path: Path) -> None:
    images = TrainerImages(settings(tmp_path))
    images.set_pin("text", "sha256:aaa", "source")
    images.set_pin("image", "sha256:bbb", "source")
    assert images.reference("text") == "sha256:aaa"
    assert TrainerImages(settings(tmp_path)).reference("image") == "sha256:bbb"
    assert TrainerImages(settings(tmp_path, trainer_text_image="another:2")).reference("text") == "another:2"
    images.set_pin("text", "sha256:ccc", "source")
    assert images.reference("text") == "sha256:ccc"


def test_an_unknown_image_is_rejected_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownImage, match="text, image, toolkit"):
        TrainerImages(settings(tmp_path)).reference("other")


@pytest.mark.parametrize("content", ["", "[]", '{"text": {}}', '{"text": 1}'])
def test_a_damaged_pin_file_is_an_error(content: str, tmp_path: Path) -> None:
    """Otherwise whatever the name means today would run."""
    (tmp_path / PINS_FILE).write_text(content)
    with pytest.raises(UnknownImage, match="delete it"):
        TrainerImages(settings(tmp_path)).reference("text")


TEXT = IMAGE_KINDS["text"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "dockerfiles").mkdir()
    (tmp_path / "dockerfiles" / TEXT.dockerfile).write_text("FROM scratch\n")
    for name in ("core", "trainer", "configs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file.py").write_text(name)
    return tmp_path


def test_the_hash_changes_with_the_sources_and_with_nothing_else(root: Path) -> None:
    before = source_hash(root, TEXT)
    (root / "core" / "__pycache__").mkdir()
    (root / "core" / "__pycache__" / "file.cpython-311.pyc").write_text("x")
    (root / "miner").mkdir()
    (root / "miner" / "file.py").write_text("the daemon is not in it")
    assert source_hash(root, TEXT) == before
    seen = {before}
    for path, text in (
        ("core/file.py", "new"),
        ("trainer/new.py", ""),
        (f"dockerfiles/{TEXT.dockerfile}", "#"),
    ):
        (root / path).write_text(text)
        seen.add(source_hash(root, TEXT))
    assert len(seen) == 4
    (root / "trainer" / "new.py").rename(root / "trainer" / "renamed.py")
    assert source_hash(root, TEXT) not in seen


def test_a_missing_dockerfile_is_an_error(root: Path) -> None:
    with pytest.raises(BuildFailed, match="toolkit"):
        source_hash(root, IMAGE_KINDS["toolkit"])


def test_a_failure_in_the_stream_is_one() -> None:
    output: list[str] = []
    lines = [{"stream": "Step 1\n"}, {"stream": "\n"}, {"status": "Pulling"}, {"error": "exit code 1\n"}]
    with pytest.raises(BuildFailed, match=f"{TEXT.dockerfile} could not be built: exit code 1$"):
        _follow_build(iter(lines), TEXT, output.append)
    assert output == ["Step 1", "Pulling"]
