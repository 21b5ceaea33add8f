"""Who needs which model: a small file per job, so that it holds across restarts and for other processes.

A training that goes on while the daemon is down reads its model from the cache all the same.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from core.files import write_atomically
from miner.jobs.inputs.parts import no_room_is_told


class Leases:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def hold(self, job_id: int, model: str) -> None:
        path = self._path(job_id)
        if self._model(path) != model:
            with no_room_is_told(path):
                self._folder.mkdir(parents=True, exist_ok=True)
                write_atomically(path, json.dumps({"model": model}).encode())

    def release(self, job_id: int) -> None:
        self._path(job_id).unlink(missing_ok=True)

    def release_all_but(self, jobs: Collection[int]) -> None:
        """What ended without a word, as when a daemon was killed between a job's end and its release."""
        for job_id in {job_id for held in self.by_model().values() for job_id in held} - set(jobs):
            self.release(job_id)

    def by_model(self) -> dict[str, list[int]]:
        """Model → the jobs that hold it."""
        found: dict[str, list[int]] = {}
        for path in self._folder.glob("*.json") if self._folder.is_dir() else ():
            model = self._model(path)
            if path.stem.isdigit() and model:
                found.setdefault(model, []).append(int(path.stem))
        return {model: sorted(jobs) for model, jobs in sorted(found.items())}

    def _path(self, job_id: int) -> Path:
        return self._folder / f"{job_id}.json"

    @staticmethod
    def _model(path: Path) -> str | None:
        try:
            model = json.loads(path.read_bytes())["model"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return model if isinstance(model, str) else None
