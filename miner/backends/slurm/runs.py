"""Record the runs of the Slurm backend in the data directory, which all nodes share: one directory each.

A note is written before the job is submitted and completed after it, so a daemon that lost all else finds
every run. The job itself makes `claim` there as its first act: of two jobs with one key only one begins.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from core.system.files import write_atomically

NOTE_FILE, CLAIM = "run.json", "claim"


@dataclass(frozen=True, slots=True)
class RunNote:
    key: str
    run_dir: str
    noted_at: float
    #: Slurm's number; empty until sbatch has answered.
    job: str = ""
    #: Why it will not begin: refused for its node, or withdrawn while it waited.
    not_started: str = ""


class SlurmRuns:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def directory(self, key: str) -> Path:
        return self._folder / key

    def write(self, note: RunNote) -> None:
        directory = self.directory(note.key)
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(directory / NOTE_FILE, json.dumps(asdict(note)).encode())

    def read(self, key: str) -> RunNote | None:
        if "/" in key or key.startswith("."):
            return None
        try:
            return RunNote(**json.loads((self.directory(key) / NOTE_FILE).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def claimed_by(self, key: str) -> str:
        """The number of the job that has begun; empty: none has."""
        # Opening the directory has NFS look at it again, where it would go by what it saw before.
        try:
            os.listdir(self.directory(key))
            return (self.directory(key) / CLAIM / "job").read_text().strip()
        except OSError:
            return ""

    def all(self) -> Iterator[RunNote]:
        if self._folder.is_dir():
            for path in sorted(self._folder.glob(f"*/{NOTE_FILE}")):
                if (note := self.read(path.parent.name)) is not None:
                    yield note

    def forget(self, key: str) -> None:
        shutil.rmtree(self.directory(key), ignore_errors=True)
