"""A file that arrives in pieces: `name.part` until it is whole and on disk, then renamed.

Beside it `name.state` says what it is a part of and how much of it is safely on disk: after a power cut a
file can be as long as before and hold zeros, so a download goes on from there and not from the length.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from core.files import write_atomically
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason

#: How much may be lost to a `kill -9`.
SYNC_EVERY = 16 * 1024**2
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Room:
    """What a disk must keep free."""

    keep_free: int = 0

    def check(self, folder: Path, wanted: int) -> None:
        free = shutil.disk_usage(folder).free
        if free - wanted < self.keep_free:
            raise StepFailed(
                EndReason.DISK_FULL,
                f"{folder} has {free / 1e9:.2f} GB free; {wanted / 1e9:.2f} GB are wanted, and "
                f"{self.keep_free / 1e9:.2f} GB stay free (MIN_FREE_DISK_BYTES)",
            )


class PartFile:
    """Append to it; `finish` makes it the file. An error or a kill leaves it to be resumed."""

    def __init__(self, path: Path, room: Room | None = None, sync_every: int = SYNC_EVERY) -> None:
        self.path = path
        self.size = 0
        #: Of all bytes so far.
        self.sha256 = hashlib.sha256()
        #: What it is a part of; set by `begin`.
        self.about: dict[str, Any] = {}
        self._part = path.with_name(path.name + ".part")
        self._state = path.with_name(path.name + ".state")
        self._room = room or Room()
        self._sync_every = sync_every
        self._synced = 0
        with no_room_is_told(path):
            self._file: io.FileIO = self._open()

    def _open(self) -> io.FileIO:
        """With what is safe of an earlier try. Unbuffered: what was written is the system's at once, and a
        full disk is met by a write and not by a close."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = io.FileIO(self._part, "r+" if self._part.exists() else "w+")
        try:
            state = json.loads(self._state.read_bytes())
            about, synced = dict(state["about"]), int(state["synced"])
        except (OSError, ValueError, KeyError, TypeError):
            about, synced = {}, 0
        if 0 < synced <= os.fstat(file.fileno()).st_size:
            self.about, self.size, self._synced = about, synced, synced
            self._hash_again(file)
        file.truncate(self.size)
        file.seek(self.size)
        return file

    def _hash_again(self, file: io.FileIO) -> None:
        left = self.size
        while left and (data := file.read(min(left, 1024**2))):
            self.sha256.update(data)
            left -= len(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if not self._file.closed:
            if kind is not None:
                self._save_what_is_there()
            self._file.close()
            if not self.size:
                self._part.unlink(missing_ok=True)
                self._state.unlink(missing_ok=True)

    def _save_what_is_there(self) -> None:
        # No room for the state either: then the last one that was written holds.
        with contextlib.suppress(OSError, StepFailed):
            self.sync()

    def begin(self, **about: Any) -> None:
        """From the first byte, a part of something else than before."""
        self.about, self.size, self._synced = about, 0, 0
        self.sha256 = hashlib.sha256()
        self._file.seek(0)
        self._file.truncate(0)
        self._write_state()

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        with no_room_is_told(self.path):
            while rest:
                rest = rest[self._file.write(rest) :]
        self.sha256.update(data)
        self.size += len(data)
        if self.size - self._synced >= self._sync_every:
            self.sync()
            self._room.check(self.path.parent, 0)

    def contents(self) -> bytes:
        """All of a small one."""
        return self._part.read_bytes()

    def sync(self) -> None:
        with no_room_is_told(self.path):
            os.fsync(self._file.fileno())
        self._synced = self.size
        self._write_state()

    def finish(self) -> None:
        """It is whole: from now on it has its name."""
        self.sync()
        self._file.close()
        self._part.replace(self.path)
        self._state.unlink(missing_ok=True)
        sync_folder(self.path.parent)

    def _write_state(self) -> None:
        with no_room_is_told(self.path):
            state = json.dumps({"about": self.about, "synced": self._synced})
            write_atomically(self._state, state.encode())


@contextmanager
def no_room_is_told(path: Path) -> Iterator[None]:
    """A full disk is an end with a name, not a crash."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise StepFailed(
            EndReason.DISK_FULL, f"{path.parent}: {error.strerror}; it goes on when there is room"
        ) from None


def is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _NO_ROOM


def sync_folder(folder: Path) -> None:
    """Names are on disk only when their folder is."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
