"""Files that are there whole or not at all, and folders that go whatever lies in them."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path


def write_atomically(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Write beside the file, make it durable, then rename: neither a reader nor a crash nor a power cut ever
    meets half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _keep_name(path.parent)


def _keep_name(folder: Path) -> None:
    """The rename itself is on disk once its folder is. Some file systems know no such thing."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def remove_tree(place: str | os.PathLike[str]) -> int:
    """Remove a folder with all that is in it, a link, or a file: the bytes that this freed. What is not there
    is gone already, links are never followed, and what cannot be removed stays without an error.

    A training can nest folders deeper than recursion and paths can go, so nothing here descends: what lies
    two levels down is moved up first. Memory and open files stay the same however much there is.
    """
    removal = _Removal()
    try:
        top = _opened(None, place)
    except OSError:
        removal.unlink(os.fspath(place), None)
        return removal.freed
    try:
        while removal.pass_over(top):
            pass
    finally:
        os.close(top)
    with contextlib.suppress(OSError):
        os.rmdir(place)
    return removal.freed


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _Removal:
    def __init__(self) -> None:
        self.freed = 0
        #: Whatever was removed or moved.
        self._changes = 0
        self._prefix = f".removed-{secrets.token_hex(4)}"

    def pass_over(self, top: int) -> bool:
        """Whether anything changed: a folder that changes while it is read may not show all at once."""
        before = self._changes
        for name, is_folder in _entries(top):
            if is_folder:
                self._empty(top, name)
            else:
                self.unlink(name, top)
        return self._changes > before

    def _empty(self, top: int, name: str) -> None:
        """Remove a folder's files, move its folders up into `top`, then remove it."""
        with contextlib.suppress(OSError):
            folder = _opened(top, name)
            try:
                for inner, is_folder in _entries(folder):
                    if is_folder:
                        self._move_up(folder, inner, top)
                    else:
                        self.unlink(inner, folder)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=top)
            self._changes += 1

    def _move_up(self, folder: int, name: str, top: int) -> None:
        with contextlib.suppress(OSError):
            os.close(_opened(folder, name))  # a folder that may not be changed may not be moved
            os.rename(name, f"{self._prefix}-{self._changes}", src_dir_fd=folder, dst_dir_fd=top)
            self._changes += 1

    def unlink(self, name: str, folder: int | None) -> None:
        with contextlib.suppress(OSError):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            os.unlink(name, dir_fd=folder)
            self._changes += 1
            # Another name of the same file keeps its blocks.
            self.freed += found.st_size if found.st_nlink == 1 and stat.S_ISREG(found.st_mode) else 0


def _entries(folder: int) -> Iterator[tuple[str, bool]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            yield entry.name, entry.is_dir(follow_symlinks=False)


def _opened(top: int | None, name: str | os.PathLike[str]) -> int:
    """For reading, also a folder that its owner may not read; from now on its owner may change it."""
    try:
        opened = os.open(name, _FOLDER, dir_fd=top)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=top)
        opened = os.open(name, _FOLDER, dir_fd=top)
    with contextlib.suppress(OSError):  # somebody else's
        os.fchmod(opened, 0o700)
    return opened
