from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.system import files
from core.system.files import read_regular_file, remove_tree, write_atomically


def nested(place: Path, depth: int, *, wide: bool = False) -> None:
    """Folders in folders, deeper than a path can be long."""
    place.mkdir()
    here = os.open(place, os.O_RDONLY)
    for level in range(depth):
        for name in ("d", "e") if wide and level < 5 else ("d",):
            os.mkdir(name, dir_fd=here)
        with open(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here), "wb") as file:
            file.write(b"x" * 10)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)


def test_nested_directories_are_removed_however_deep(tmp_path: Path) -> None:
    nested(tmp_path / "deep", 3000, wide=True)
    (tmp_path / "deep" / "closed").mkdir(mode=0)
    assert remove_tree(tmp_path / "deep") == 30_000
    assert list(tmp_path.iterdir()) == []


def test_read_only_directories_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root is not asked for its permission, so this runs as somebody else."""
    monkeypatch.chdir(tmp_path)
    user = os.geteuid() or 65_534
    os.chown(".", user, -1)
    os.seteuid(user)
    try:
        for folder in ("tree", "tree/a", "tree/a/b"):
            os.mkdir(folder)
            Path(folder, "file").write_text("x" * 10)
        for folder, mode in (("tree/a/b", 0o000), ("tree/a", 0o555), ("tree", 0o555)):
            os.chmod(folder, mode)
        freed = remove_tree("tree")
    finally:
        if user == 65_534:
            os.seteuid(0)
    assert (freed, os.listdir(".")) == (30, [])


def test_removing_never_follows_a_link(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    (tmp_path / "link").symlink_to(kept)
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(kept)
    os.link(kept / "file", inside / "same")
    for place in ("link", "not there", "inside"):
        assert remove_tree(tmp_path / place) == 0, "another name of a file frees nothing"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (kept / "file").exists()


def test_a_directory_that_cannot_be_removed_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad" / "inner").mkdir(parents=True)

    def refused(*_: object, **__: object) -> None:
        raise OSError(1, "not permitted")

    monkeypatch.setattr(files.os, "rmdir", refused)
    assert remove_tree(tmp_path / "bad") == 0


def test_a_file_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(files.os, "fsync", lambda file: (done.append("fsync"), fsync(file))[1])
    monkeypatch.setattr(files.os, "replace", lambda *both: (done.append("replace"), replace(*both))[1])
    for text in (b"first", b"second"):
        write_atomically(tmp_path / "run.json", text, mode=0o644)
    assert done == ["fsync", "replace", "fsync"] * 2
    assert (tmp_path / "run.json").read_bytes() == b"second"
    assert (tmp_path / "run.json").stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A named pipe without a writer would be waited for for ever."""
    (tmp_path / "file").write_bytes(b"text")
    os.mkfifo(tmp_path / "pipe")
    assert read_regular_file(tmp_path / "file") == b"text"
    for other in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            read_regular_file(other)
