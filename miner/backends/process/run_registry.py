"""Record the runs of the process backend: one directory each, and a lock that says whether it is alive.

The wrapper inherits the lock and holds it until it ends; the kernel releases it whatever kills the
wrapper. So a run is known at every instant, and a recycled process number is never taken for it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from core.system.files import write_atomically
from miner.backends.run_folder import current_boot

RUN_NOTE_FILE, LOCK_FILE, ERRORS_FILE = "run.json", "lock", "errors"


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The wrapper, as it wrote itself into the lock."""

    pid: int
    #: Clock ticks since the machine's start: with the pid they name exactly one process.
    started: int


class _RunNote(BaseModel):
    """The part of a run's note that is read again."""

    run_dir: Path | None = None
    cgroups: tuple[Path, ...] = ()


class RunRegistry:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def directory(self, key: str) -> Path:
        return self.folder / key

    def keys(self) -> Iterator[str]:
        if self.folder.is_dir():
            yield from sorted(path.parent.name for path in self.folder.glob(f"*/{RUN_NOTE_FILE}"))

    def write(self, key: str, run_dir: Path, labels: Mapping[str, str], cgroups: Sequence[Path]) -> None:
        directory = self.directory(key)
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        note = {
            "key": key,
            "run_dir": str(run_dir),
            "labels": dict(labels),
            "cgroups": [str(folder) for folder in cgroups],
        }
        write_atomically(directory / RUN_NOTE_FILE, json.dumps(note).encode())

    def run_dir(self, key: str) -> Path | None:
        return self._note(key).run_dir

    def cgroups(self, key: str) -> tuple[Path, ...]:
        """The run's own cgroups: another daemon may be in another group itself, and make new ones
        elsewhere."""
        return self._note(key).cgroups

    def _note(self, key: str) -> _RunNote:
        try:
            return _RunNote.model_validate_json((self.directory(key) / RUN_NOTE_FILE).read_bytes())
        except (OSError, ValueError):
            return _RunNote()

    def take_lock(self, key: str) -> int | None:
        """Take the lock, to hand it to the wrapper; return None if it is held."""
        lock = os.open(self.directory(key) / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock

    def is_alive(self, key: str) -> bool:
        try:
            lock = os.open(self.directory(key) / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    def lock_holder(self, key: str) -> LockHolder | None:
        """The process that signed the lock, or None if none has since the machine's start."""
        try:
            signed = json.loads((self.directory(key) / LOCK_FILE).read_bytes())
            if signed["boot"] != current_boot():
                return None
            return LockHolder(int(signed["pid"]), int(signed["started"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def sign_for_lost(self, key: str) -> None:
        """Sign the lock with the key of a wrapper that ended before it could."""
        (self.directory(key) / LOCK_FILE).write_bytes(b"{}")

    def was_started(self, key: str) -> bool:
        try:
            return (self.directory(key) / LOCK_FILE).stat().st_size > 0
        except FileNotFoundError:
            return False

    def errors(self, key: str) -> str:
        """The wrapper's own error messages."""
        try:
            return (self.directory(key) / ERRORS_FILE).read_text(errors="replace").strip()[-500:]
        except OSError:
            return ""

    def forget(self, key: str) -> None:
        shutil.rmtree(self.directory(key), ignore_errors=True)
