"""Files of a run folder, whatever was put in their place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from miner.support import untrusted_files
from miner.support.untrusted_files import open_untrusted, read_untrusted_in, write_untrusted


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    made = tmp_path / "jobs" / "1" / "attempt_1"
    made.mkdir(parents=True)
    return made


def test_a_plain_file_is_read(run_dir: Path) -> None:
    (run_dir / "file").write_bytes(b"content")
    assert read_untrusted_in(run_dir, "file") == b"content"
    with open_untrusted(run_dir, "file") as file:
        assert os.pread(file, 3, 2) == b"nte"


def test_what_is_not_there_or_too_large_is_none(run_dir: Path) -> None:
    (run_dir / "file").write_bytes(b"x" * 11)
    assert read_untrusted_in(run_dir, "none") is None
    assert read_untrusted_in(run_dir, "file", 10) is None
    assert read_untrusted_in(run_dir / "none", "file") is None


def test_links_pipes_and_folders_are_not_read(run_dir: Path, tmp_path: Path) -> None:
    secret = tmp_path / "wallet"
    secret.write_text("secret")
    (run_dir / "link").symlink_to(secret)
    os.mkfifo(run_dir / "pipe")
    (run_dir / "folder").mkdir()
    os.link(secret, run_dir / "real")
    for name in ("link", "pipe", "folder", "../../../wallet/"):
        assert read_untrusted_in(run_dir, name) is None
    # A second name of the same file can only be made by who may read it.
    assert read_untrusted_in(run_dir, "real") == b"secret"


def test_a_run_folder_that_was_exchanged_is_not_entered(run_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("secret")
    run_dir.rmdir()
    run_dir.symlink_to(elsewhere)
    assert read_untrusted_in(run_dir, "file") is None
    with pytest.raises(OSError, match=r"Not a directory|Too many"):
        write_untrusted(run_dir, "new", b"x")
    assert not (elsewhere / "new").exists()


def test_writing_replaces_a_link_and_leaves_what_it_led_to(run_dir: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("whole")
    for name in ("note", ".note.put"):
        (run_dir / name).symlink_to(victim)
    write_untrusted(run_dir, "note", b"ours")
    assert victim.read_text() == "whole"
    assert not (run_dir / "note").is_symlink()
    assert (run_dir / "note").read_bytes() == b"ours"
    assert not (run_dir / ".note.put").exists()


def test_pieces_of_a_plain_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    assert untrusted_files.read_untrusted_path(path, 10) == b"0123456789"
    assert untrusted_files.read_untrusted_path(path, 9) is None
    assert untrusted_files.read_untrusted_from(path, 4, 3) == (b"456", 10)
    assert untrusted_files.read_untrusted_from(path, 99, 3) == (b"", 10)
    assert untrusted_files.read_untrusted_from(tmp_path / "none", 0, 3) == (b"", 0)


def test_links_pipes_and_folders_are_nothing(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder"):
        assert untrusted_files.read_untrusted_path(tmp_path / name, 10) is None
        assert untrusted_files.read_untrusted_from(tmp_path / name, 0, 10) == (b"", 0)


def test_a_link_in_the_place_of_a_file_to_make_is_replaced_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (tmp_path / "stop").symlink_to(target)
    untrusted_files.touch_untrusted(tmp_path / "stop")
    assert not target.exists()
    assert (tmp_path / "stop").read_bytes() == b""
