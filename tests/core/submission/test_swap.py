from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from core.submission import swap as module
from core.submission.faults import BadSubmission
from core.submission.folder import FolderListing
from core.submission.swap import put_in_place, recover_swap, take_snapshot
from tests.core.submission.folders import write

FILES = [f"part-{number}" for number in range(12)]


def version(folder: Path, number: int) -> Path:
    return write(folder, dict.fromkeys(FILES, f"{number}") | {"sub/deep": f"{number}"})


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def frozen_copy(place: Path, into: Path) -> Path:
    take_snapshot(place, into)
    return into


def failing_link(monkeypatch: pytest.MonkeyPatch, code: int, before: Callable[[Path], object]) -> None:
    def link(source: Path, *_: object, **__: object) -> None:
        before(source)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)


@pytest.fixture(params=["exchange", "two steps"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "two steps":
        monkeypatch.setattr(module, "_exchange", lambda new, place: False)
    return str(request.param)


def test_a_better_submission_replaces_the_old_one_completely(tmp_path: Path, way: str) -> None:
    place = tmp_path / "submission"
    for number in range(3):
        put_in_place(version(tmp_path / f"submission.tmp-{number}", number), place)
        assert set(contents(place).values()) == {str(number)}
    assert [path.name for path in tmp_path.iterdir()] == ["submission"]


def test_the_usual_file_systems_swap_in_one_step(tmp_path: Path) -> None:
    old, new = version(tmp_path / "old", 1), version(tmp_path / "new", 2)
    assert module._exchange(new, old)
    assert set(contents(old).values()) == {"2"}


def test_files_become_readable_for_the_publisher(tmp_path: Path) -> None:
    new = version(tmp_path / "new", 1)
    (new / "part-1").chmod(0o600)
    (new / "sub").chmod(0o700)
    put_in_place(new, tmp_path / "submission")
    assert (tmp_path / "submission" / "part-1").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "submission" / "sub").stat().st_mode & 0o777 == 0o755


def test_a_snapshot_takes_no_space_and_stays_when_a_better_one_comes(tmp_path: Path, way: str) -> None:
    place = tmp_path / "submission"
    put_in_place(version(tmp_path / "a", 1), place)
    frozen = frozen_copy(place, tmp_path / "frozen")
    assert (frozen / "part-0").stat().st_ino == (place / "part-0").stat().st_ino
    put_in_place(version(tmp_path / "b", 2), place)
    assert set(contents(frozen).values()) == {"1"}
    assert set(contents(frozen_copy(place, tmp_path / "frozen")).values()) == {"2"}
    assert {path.name for path in tmp_path.iterdir()} == {"submission", "frozen"}


@pytest.mark.parametrize("odd", ["link", "pipe"])
def test_a_submission_with_links_or_pipes_in_it_is_refused_and_leaves_nothing(
    tmp_path: Path, odd: str
) -> None:
    place = version(tmp_path / "submission", 1)
    if odd == "link":
        (place / odd).symlink_to("/etc/passwd")
    else:
        os.mkfifo(place / odd)
    with pytest.raises(BadSubmission, match=odd):
        take_snapshot(place, tmp_path / "frozen")
    assert [path.name for path in tmp_path.iterdir()] == ["submission"]


@pytest.mark.parametrize("linked", [True, False])
def test_a_linked_folder_or_none_at_all_is_refused(tmp_path: Path, linked: bool) -> None:
    if linked:
        (tmp_path / "submission").symlink_to(version(tmp_path / "elsewhere", 1))
    with pytest.raises(BadSubmission, match="is not there"):
        take_snapshot(tmp_path / "submission", tmp_path / "frozen")
    assert not (tmp_path / "frozen").exists()


def test_where_links_are_not_allowed_it_is_a_real_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = version(tmp_path / "submission", 1)
    failing_link(monkeypatch, errno.EPERM, lambda _: None)
    frozen = frozen_copy(place, tmp_path / "frozen")
    assert contents(frozen) == contents(place)
    assert (frozen / "part-0").stat().st_ino != (place / "part-0").stat().st_ino


def test_a_file_written_to_while_it_is_copied_is_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, written = version(tmp_path / "submission", 1), []
    failing_link(
        monkeypatch, errno.EPERM, lambda file: written or written.append(Path(file).write_text("longer"))
    )
    assert contents(frozen_copy(place, tmp_path / "frozen")) == contents(place)
    assert "longer" in contents(place).values()


def test_a_full_disk_leaves_the_earlier_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = version(tmp_path / "submission", 1)
    take_snapshot(place, tmp_path / "frozen")
    failing_link(monkeypatch, errno.ENOSPC, lambda _: None)
    with pytest.raises(OSError, match="No space"):
        take_snapshot(place, tmp_path / "frozen")
    assert set(contents(tmp_path / "frozen").values()) == {"1"}
    assert {path.name for path in tmp_path.iterdir()} == {"submission", "frozen"}


@pytest.mark.parametrize("listed", ["before", "after"])
def test_a_submission_replaced_while_it_is_listed_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str
) -> None:
    place, list_folder = version(tmp_path / "submission", 1), module.list_folder

    def replacing(folder: Path) -> FolderListing:
        monkeypatch.setattr(module, "list_folder", list_folder)
        listing = list_folder(folder) if listed == "before" else None
        put_in_place(version(tmp_path / "better", 2), place)
        return listing or list_folder(folder)

    monkeypatch.setattr(module, "list_folder", replacing)
    assert set(contents(frozen_copy(place, tmp_path / "frozen")).values()) == {"2"}


def test_a_copy_never_mixes_two_submissions_while_they_come_fast(tmp_path: Path, way: str) -> None:
    place, over = tmp_path / "submission", threading.Event()
    put_in_place(version(tmp_path / "first", 0), place)

    def trainer() -> None:
        number = 0
        while not over.is_set():
            number += 1
            put_in_place(version(tmp_path / f"submission.tmp-{number}", number), place)

    thread, whole, ends = threading.Thread(target=trainer), 0, time.monotonic() + 120
    thread.start()
    try:
        while whole < 12:
            assert time.monotonic() < ends
            try:
                frozen = contents(frozen_copy(place, tmp_path / f"frozen-{whole}"))
            except BadSubmission:
                continue  # it gave up, and said so
            whole += 1
            assert len(set(frozen.values())) == 1
            assert set(frozen) == {*FILES, "sub/deep"}
    finally:
        over.set()
        thread.join()


_SWAPPER = """
import os
import sys
from pathlib import Path
from core.submission import swap
from tests.core.submission.test_swap import version
from tests.doubles.deaths import die_before

if sys.argv[2] == "two steps":
    swap._exchange = lambda new, at: False
root, number = Path(sys.argv[1]), 0
for line in sys.stdin:
    number += 1
    child = os.fork()
    if child == 0:
        fresh = version(root / f"submission.tmp-{number}", number)
        die_before(int(line))
        swap.put_in_place(fresh, root / "submission")
        os._exit(0)
    print(os.WIFSIGNALED(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.process
def test_a_trainer_killed_before_any_step_leaves_a_whole_submission(tmp_path: Path, way: str) -> None:
    place = tmp_path / "submission"
    put_in_place(version(tmp_path / "first", 0), place)
    command = [sys.executable, "-c", _SWAPPER, str(tmp_path), way]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        for step in range(1, 100):
            process.stdin.write(f"{step}\n")
            died = process.stdout.readline() == "True\n"
            assert recover_swap(place), step
            assert len(set(contents(place).values())) == 1, step
            assert set(contents(place)) == {*FILES, "sub/deep"}, step
            if not died:
                break
        process.stdin.close()
    assert 1 < step < 99
