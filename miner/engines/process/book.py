"""What the engine remembers of its runs: one folder each, and a lock that says whether it lives.

The wrapper inherits the lock and holds it as long as it lives; the kernel lets go of it whatever kills it.
So there is no instant at which a run is unknown, not even between starting it and writing down its number,
and no number that another process got meanwhile is ever taken for it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miner.engines.outcome import this_boot

NOTE, LOCK, ERRORS = "run.json", "lock", "errors"


@dataclass(frozen=True, slots=True)
class Holder:
    """The wrapper, as it signed the lock."""

    pid: int
    #: Clock ticks since the machine's start: with the pid it is this process and no other.
    started: int


class Book:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def place(self, key: str) -> Path:
        return self.folder / key

    def keys(self) -> Iterator[str]:
        if self.folder.is_dir():
            yield from sorted(path.parent.name for path in self.folder.glob(f"*/{NOTE}"))

    def write(self, key: str, run_dir: Path, labels: Mapping[str, str], cgroups: Sequence[Path]) -> None:
        place = self.place(key)
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        note = {
            "key": key,
            "run_dir": str(run_dir),
            "labels": dict(labels),
            "cgroups": [str(folder) for folder in cgroups],
        }
        part = place / f".{NOTE}.part"
        part.write_text(json.dumps(note))
        part.replace(place / NOTE)

    def run_dir(self, key: str) -> Path | None:
        told = self._note(key).get("run_dir")
        return Path(told) if isinstance(told, str) else None

    def cgroups(self, key: str) -> tuple[Path, ...]:
        """Where they are: another daemon may be in another group itself, and make new ones elsewhere."""
        return tuple(Path(folder) for folder in self._note(key).get("cgroups") or ())

    def _note(self, key: str) -> dict[str, Any]:
        try:
            found = json.loads((self.place(key) / NOTE).read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def locked(self, key: str) -> int | None:
        """The lock, taken and to be handed to the wrapper; None when somebody has it."""
        lock = os.open(self.place(key) / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock

    def lives(self, key: str) -> bool:
        try:
            lock = os.open(self.place(key) / LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    def holder(self, key: str) -> Holder | None:
        """Who signed the lock; None when nobody did, or before this start of the machine."""
        try:
            signed = json.loads((self.place(key) / LOCK).read_bytes())
            if signed["boot"] != this_boot():
                return None
            return Holder(int(signed["pid"]), int(signed["started"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def was_started(self, key: str) -> bool:
        try:
            return (self.place(key) / LOCK).stat().st_size > 0
        except FileNotFoundError:
            return False

    def errors(self, key: str) -> str:
        """What the wrapper itself complained about."""
        try:
            return (self.place(key) / ERRORS).read_text(errors="replace").strip()[-500:]
        except OSError:
            return ""

    def forget(self, key: str) -> None:
        shutil.rmtree(self.place(key), ignore_errors=True)
