"""What the hub's client uploads, told as it goes, and without reading anything twice."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from huggingface_hub import CommitOperationAdd
from huggingface_hub.utils import _xet_progress_reporting

from core.submission.documents import Item
from core.submission.folder import open_plain

#: How often progress is told at most.
EVERY_SECONDS = 0.25

Told = Callable[[int, int], None]


class Tally:
    """How much of all files has left, whichever way they go."""

    def __init__(self, total: int, told: Told) -> None:
        self.total = total
        #: Bytes that went over the wire, again and again where it was cut.
        self.sent = 0
        self._told = told
        self._at: dict[str, int] = {}
        self._last = 0.0
        self._lock = threading.Lock()

    def at(self, name: str, position: int, read: int) -> None:
        """A file was read for sending up to `position`."""
        with self._lock:
            self._at[name] = position
            self.sent += read
            self._tell(sum(self._at.values()))

    def deduplicated(self, done: int, sent: int) -> None:
        """What the deduplicating client says of all its files together."""
        with self._lock:
            self.sent = sent
            self._at[""] = done
            self._tell(sum(self._at.values()))

    def finish(self) -> None:
        """Everything is there, also what went with the commit itself."""
        with self._lock:
            self._tell(self.total)

    def _tell(self, done: int) -> None:
        now = time.monotonic()
        if now - self._last >= EVERY_SECONDS or done >= self.total:
            self._last = now
            self._told(min(done, self.total), self.total)


class _Counted(io.FileIO):
    """A file that says how far it was read."""

    def __init__(self, path: Path, name: str, tally: Tally) -> None:
        super().__init__(open_plain(path), "r", closefd=True)
        self._name, self._tally = name, tally

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer) or 0
        self._tally.at(self._name, self.tell(), count)
        return count


@dataclass
class Addition(CommitOperationAdd):
    """A file to add, whose SHA-256 is known already."""

    tally: Tally | None = field(default=None, repr=False)
    source: Path | None = None

    @contextlib.contextmanager
    def as_file(self, with_tqdm: bool = False) -> Iterator[BinaryIO]:
        if self.source is None or self.tally is None or not with_tqdm:
            with super().as_file() as file:
                yield file
            return
        # `with_tqdm` is asked for where it is sent, and not where it is merely looked at.
        with io.BufferedReader(_Counted(self.source, self.path_in_repo, self.tally), 1 << 20) as file:
            yield file


def addition(name: str, item: Item, sha256: str, tally: Tally) -> Addition:
    if isinstance(item, bytes):
        return Addition(name, item)
    made = Addition(name, os.fspath(item), tally=tally, source=item)
    made.upload_info.sha256 = bytes.fromhex(sha256)
    return made


def watch_deduplicated(tally: Tally) -> None:
    """Have the deduplicating transfer report to `tally` instead of drawing bars."""

    class Reporter:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def update_progress(self, group: Any, *_: Any) -> None:
            tally.deduplicated(group.total_bytes_completed, group.total_transfer_bytes_completed)

        def close(self, *_: Any) -> None:
            pass

    # The client offers no other place to listen at; without it there would be no progress, and no harm.
    _xet_progress_reporting.XetUploadProgressReporter = Reporter  # type: ignore[assignment,misc]
