"""Files of a run folder, whatever was put in their place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from miner.support.untrusted_files import (
    read_untrusted,
    read_untrusted_from,
    touch_untrusted,
    write_untrusted,
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    made = tmp_path / "jobs" / "1" / "attempt_1"
    made.mkdir(parents=True)
    return made


def test_a_plain_file_is_read_whole_if_it_is_small_or_in_pieces(run_dir: Path) -> None:
    path = run_dir / "file"
    path.write_bytes(b"0123456789")
    assert read_untrusted(path) == read_untrusted(path, 10) == b"0123456789"
    assert read_untrusted(path, 9) is None
    assert read_untrusted_from(path, 4, 3) == (b"456", 10)
    assert read_untrusted_from(path, 99, 3) == (b"", 10)


def test_only_plain_files_are_read(run_dir: Path, tmp_path: Path) -> None:
    secret = tmp_path / "wallet"
    secret.write_text("secret")
    (run_dir / "link").symlink_to(secret)
    os.mkfifo(run_dir / "pipe")
    (run_dir / "folder").mkdir()
    os.link(secret, run_dir / "real")
    for name in ("missing", "link", "pipe", "folder", "missing/file"):
        assert read_untrusted(run_dir / name) is None, name
        assert read_untrusted_from(run_dir / name, 0, 10) == (b"", 0), name
    # A second name of the same file can only be made by who may read it.
    assert read_untrusted(run_dir / "real") == b"secret"


def test_a_run_folder_that_was_exchanged_is_not_entered(run_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("secret")
    run_dir.rmdir()
    run_dir.symlink_to(elsewhere)
    assert read_untrusted(run_dir / "file") is None
    assert not touch_untrusted(run_dir / "new")
    with pytest.raises(OSError, match=r"Not a directory|Too many"):
        write_untrusted(run_dir / "new", b"x")
    assert not (elsewhere / "new").exists()


def test_writing_replaces_a_link_and_leaves_what_it_led_to(run_dir: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("whole")
    for name in ("note", ".note.put", "stop"):
        (run_dir / name).symlink_to(victim)
    write_untrusted(run_dir / "note", b"ours")
    assert touch_untrusted(run_dir / "stop")
    assert victim.read_text() == "whole"
    assert not (run_dir / "note").is_symlink()
    assert [(run_dir / name).read_bytes() for name in ("note", "stop")] == [b"ours", b""]
    assert not (run_dir / ".note.put").exists()
