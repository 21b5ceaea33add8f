from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from core.submission import folder
from core.submission.faults import BadSubmission, FaultKind
from core.submission.folder import list_folder, open_plain, read_plain

pytestmark = pytest.mark.process


def test_files_are_listed_by_their_paths_with_sizes(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.txt").write_bytes(b"12345")
    (tmp_path / "a.txt").write_bytes(b"1")
    assert [(entry.path, entry.size) for entry in list_folder(tmp_path).files] == [
        ("a.txt", 1),
        ("b/c.txt", 5),
    ]


def test_links_pipes_and_sockets_are_named_and_never_followed(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (outside / "secret").write_text("x")
    (inside / "file_link").symlink_to(outside / "secret")
    (inside / "folder_link").symlink_to(outside)
    (inside / "loop").symlink_to(inside)
    os.mkfifo(inside / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(inside / "socket"))
        listing = list_folder(inside)
    assert not listing.files
    odd = {fault.where for fault in listing.faults if fault.kind is FaultKind.NOT_A_FILE}
    assert odd == {"file_link", "folder_link", "loop", "pipe", "socket"}


def test_unprintable_names_are_faults_and_shown_printable(tmp_path: Path) -> None:
    (tmp_path / "a\nb").write_text("")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")).write_text("")
    (tmp_path / "ünï 🙂 ok").write_text("")
    listing = list_folder(tmp_path)
    assert [entry.path for entry in listing.files] == ["ünï 🙂 ok"]
    assert [fault.kind for fault in listing.faults] == [FaultKind.BAD_NAME] * 2
    assert all(str(fault).isprintable() for fault in listing.faults)


def test_a_folder_too_deep_or_too_full_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / Path(*["d"] * (folder.MAX_DEPTH + 2))
    deep.mkdir(parents=True)
    with pytest.raises(BadSubmission, match="folders 12 deep"):
        list_folder(tmp_path)
    monkeypatch.setattr(folder, "MAX_ENTRIES", 5)
    wide = tmp_path / "wide"
    wide.mkdir()
    for number in range(7):
        (wide / str(number)).touch()
    with pytest.raises(BadSubmission, match="more than 5 entries"):
        list_folder(wide)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadSubmission, match=r"nothing: cannot be read: No such file"):
        list_folder(tmp_path / "nothing")


def test_a_pipe_is_not_waited_for_and_a_link_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("pipe", "link", "."):
        with pytest.raises(OSError):
            open_plain(tmp_path / name)


def test_a_document_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 11)
    assert read_plain(tmp_path / "file", 11) == b"x" * 11
    with pytest.raises(OSError, match="larger than 10 bytes"):
        read_plain(tmp_path / "file", 10)
