"""Write files atomically, and remove directory trees whatever they contain."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path


def read_regular_file(path: Path) -> bytes:
    """Read a regular file; raise `OSError` for others. A read of a named pipe might never return."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    with os.fdopen(handle, "rb") as file:
        return file.read()


def write_atomically(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Write beside the file, sync, then rename: no reader, crash or power cut ever sees half of it."""
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
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Sync the directory, so that the rename is on disk. Some file systems do not support it."""
    with contextlib.suppress(OSError):
        opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def remove_tree(place: str | os.PathLike[str]) -> int:
    """Remove a directory tree, a link or a file; return the bytes that this freed. Links are never followed;
    a missing or unremovable file is not an error.

    A training can nest directories deeper than recursion and paths can go, so nothing here descends: what is
    two levels down is moved up first. Memory and open files stay the same, however much there is.
    """
    removal = _Removal()
    try:
        top = _open_directory(None, place)
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


@contextlib.contextmanager
def temporary_tree(prefix: str, *, parent: Path | None = None) -> Iterator[Path]:
    """A new directory that is removed in the end, however deep what is put into it."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield folder
    finally:
        remove_tree(folder)


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _Removal:
    def __init__(self) -> None:
        self.freed = 0
        #: Entries removed or moved.
        self._changes = 0
        self._prefix = f".removed-{secrets.token_hex(4)}"

    def pass_over(self, top: int) -> bool:
        """Return whether anything changed: a directory that changes may not list all entries at once."""
        before = self._changes
        for name, is_directory in _entries(top):
            if is_directory:
                self._empty(top, name)
            else:
                self.unlink(name, top)
        return self._changes > before

    def _empty(self, top: int, name: str) -> None:
        """Remove a directory's files, move its directories up into `top`, then remove it."""
        with contextlib.suppress(OSError):
            directory = _open_directory(top, name)
            try:
                for inner, is_directory in _entries(directory):
                    if is_directory:
                        self._move_up(directory, inner, top)
                    else:
                        self.unlink(inner, directory)
            finally:
                os.close(directory)
            os.rmdir(name, dir_fd=top)
            self._changes += 1

    def _move_up(self, directory: int, name: str, top: int) -> None:
        with contextlib.suppress(OSError):
            os.close(_open_directory(directory, name))  # a directory that may not be changed may not be moved
            os.rename(name, f"{self._prefix}-{self._changes}", src_dir_fd=directory, dst_dir_fd=top)
            self._changes += 1

    def unlink(self, name: str, directory: int | None) -> None:
        with contextlib.suppress(OSError):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            os.unlink(name, dir_fd=directory)
            self._changes += 1
            # Another name of the same file keeps its blocks.
            self.freed += status.st_size if status.st_nlink == 1 and stat.S_ISREG(status.st_mode) else 0


def _entries(directory: int) -> Iterator[tuple[str, bool]]:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            yield entry.name, entry.is_dir(follow_symlinks=False)


def _open_directory(top: int | None, name: str | os.PathLike[str]) -> int:
    """Open for reading, even without permission; the owner may change the directory from now on."""
    try:
        opened = os.open(name, _DIRECTORY, dir_fd=top)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=top)
        opened = os.open(name, _DIRECTORY, dir_fd=top)
    with contextlib.suppress(OSError):  # somebody else's
        os.fchmod(opened, 0o700)
    return opened
