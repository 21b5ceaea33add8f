"""What images are made from, and when a build has failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from miner.engines.docker.building import BuildFailed, _follow, source_hash, source_root
from miner.engines.docker.images import KINDS

TEXT = KINDS["text"]


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


def test_a_dockerfile_that_is_not_there_is_told(root: Path) -> None:
    with pytest.raises(BuildFailed, match="toolkit"):
        source_hash(root, KINDS["toolkit"])


def test_this_checkout_is_found() -> None:
    assert (source_root() / "dockerfiles").is_dir()


def test_a_failure_in_the_stream_is_one() -> None:
    told: list[str] = []
    lines = [{"stream": "Step 1\n"}, {"stream": "\n"}, {"status": "Pulling"}, {"error": "exit code 1\n"}]
    with pytest.raises(BuildFailed, match=f"{TEXT.dockerfile} could not be built: exit code 1$"):
        _follow(iter(lines), TEXT, told.append)
    assert told == ["Step 1", "Pulling"]
