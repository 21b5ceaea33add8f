"""Files that arrive in pieces (`name.part` until complete, then renamed), and retries of fetching them.

`name.state` says what the part belongs to and how much of it is safely on disk: after a power cut a file
can be as long as before and hold zeros, so a download resumes from there and not from the length.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from core.domain.job_states import EndReason, StepFailed
from core.system.files import write_atomically

#: Bytes that a `kill -9` may lose.
SYNC_EVERY = 16 * 1024**2
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class DiskReserve:
    """Bytes of a disk that must stay free."""

    keep_free: int = 0

    def require(self, folder: Path, wanted: int) -> None:
        free = shutil.disk_usage(folder).free
        if free - wanted < self.keep_free:
            raise StepFailed(
                EndReason.DISK_FULL,
                f"{folder} has {free / 1e9:.2f} GB free; {wanted / 1e9:.2f} GB are wanted, and "
                f"{self.keep_free / 1e9:.2f} GB stay free (MIN_FREE_DISK_BYTES)",
            )


class PartFile:
    """A file that is being fetched: append, then `finish`. An error or a kill leaves it to be resumed."""

    def __init__(self, path: Path, reserve: DiskReserve | None = None, sync_every: int = SYNC_EVERY) -> None:
        self.path = path
        self.size = 0
        #: The hash of all bytes so far.
        self.sha256 = hashlib.sha256()
        #: Identifies the whole file; set by `begin`.
        self.about: dict[str, Any] = {}
        self._part = path.with_name(path.name + ".part")
        self._state = path.with_name(path.name + ".state")
        self._reserve = reserve or DiskReserve()
        self._sync_every = sync_every
        self._synced = 0
        with disk_full_as_step_failure(path):
            self._file: io.FileIO = self._open()

    def _open(self) -> io.FileIO:
        """Open with what an earlier try has synced.

        Unbuffered: the system has at once what was written, and a full disk shows in a write, not in a close.
        """
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
                self._sync_if_possible()
            self._file.close()
            if not self.size:
                self._part.unlink(missing_ok=True)
                self._state.unlink(missing_ok=True)

    def _sync_if_possible(self) -> None:
        # On a full disk the last written state counts.
        with contextlib.suppress(OSError, StepFailed):
            self.sync()

    def begin(self, **about: Any) -> None:
        """Start over with another file."""
        self.about, self.size, self._synced = about, 0, 0
        self.sha256 = hashlib.sha256()
        self._file.seek(0)
        self._file.truncate(0)
        self._write_state()

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        with disk_full_as_step_failure(self.path):
            while rest:
                rest = rest[self._file.write(rest) :]
        self.sha256.update(data)
        self.size += len(data)
        if self.size - self._synced >= self._sync_every:
            self.sync()
            self._reserve.require(self.path.parent, 0)

    def contents(self) -> bytes:
        """The whole content, of a small file."""
        return self._part.read_bytes()

    def sync(self) -> None:
        with disk_full_as_step_failure(self.path):
            os.fsync(self._file.fileno())
        self._synced = self.size
        self._write_state()

    def finish(self) -> None:
        """The file is complete: give it its name."""
        self.sync()
        self._file.close()
        self._part.replace(self.path)
        self._state.unlink(missing_ok=True)
        sync_folder(self.path.parent)

    def _write_state(self) -> None:
        with disk_full_as_step_failure(self.path):
            state = json.dumps({"about": self.about, "synced": self._synced})
            write_atomically(self._state, state.encode())


@contextmanager
def disk_full_as_step_failure(path: Path) -> Iterator[None]:
    """Turn a full disk into `StepFailed` (DISK_FULL)."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise StepFailed(
            EndReason.DISK_FULL, f"{path.parent}: {error.strerror}; it goes on when there is space"
        ) from None


def is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _NO_ROOM


def sync_folder(folder: Path) -> None:
    """A new name is on disk only when its directory is synced."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


#: Worth another try within the same step. Stores and hubs sometimes deny what they have.
RETRIED_REASONS = (EndReason.NETWORK, EndReason.RATE_LIMITED, EndReason.DATA_GONE, EndReason.MODEL_MISSING)
#: Bytes that count as progress; with less at a time a file would take for ever.
PROGRESS_BYTES = 64 * 1024
#: A longer pause is left to the job, which releases its GPUs meanwhile.
LONGEST_WAIT = 60.0


@dataclass
class FetchRetries:
    """Pauses that double, with jitter so that tries that failed together do not come back together."""

    tries: int = 6
    first: float = 1.0
    most: float = 20.0
    pause: Callable[[float], object] = time.sleep
    jitter: Callable[[], float] = random.random
    _failed: int = field(default=0, init=False)

    def wait(self, failure: StepFailed, gained: int = 0) -> None:
        """Pause before the next try, or raise `failure` when another try is useless.

        If the try gained enough bytes, the other side is alive, and counting starts over.
        """
        self._failed = 1 if gained >= PROGRESS_BYTES else self._failed + 1
        tries = min(self.tries, 3) if failure.reason is EndReason.DATA_GONE else self.tries
        requested = failure.retry_after or 0.0
        if failure.reason not in RETRIED_REASONS or self._failed >= tries or requested > LONGEST_WAIT:
            raise failure
        backoff = min(self.first * 2 ** (self._failed - 1), self.most)
        self.pause(max(requested, backoff * (0.5 + self.jitter() / 2)))
