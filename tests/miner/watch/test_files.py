from __future__ import annotations

import os
from pathlib import Path

from miner.watch import files


def test_pieces_of_a_plain_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    assert files.read(path, 10) == b"0123456789"
    assert files.read(path, 9) is None
    assert files.read_from(path, 4, 3) == (b"456", 10)
    assert files.read_from(path, 99, 3) == (b"", 10)
    assert files.read_from(tmp_path / "none", 0, 3) == (b"", 0)


def test_links_pipes_and_folders_are_nothing(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder"):
        assert files.read(tmp_path / name, 10) is None
        assert files.read_from(tmp_path / name, 0, 10) == (b"", 0)


def test_a_link_in_the_place_of_a_file_to_make_is_replaced_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (tmp_path / "stop").symlink_to(target)
    files.touch(tmp_path / "stop")
    assert not target.exists()
    assert (tmp_path / "stop").read_bytes() == b""
