"""A job's folder on disk.

    jobs/7/inputs/           as fetched, read-only to trainings
           told/             what each attempt was told, run and plan: only the daemon writes here
           submission/       the best so far: a snapshot, likewise
           published.json    what of it is on the hub
           attempt_1/        run.json plan.json config/ command.txt environment.txt log progress.jsonl
                             result.json start.json exit.json stop submission/ work/
           latest            → attempt_1

Every attempt has a `submission/` of its own: the trainer of a later one begins without a score to beat, and
would put a worse model in the place of a better one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from core.files import remove_tree, write_atomically
from core.run_files import LOG_FILE, PLAN_FILE, PROGRESS_FILE, RESULT_FILE, RUN_FILE, STOP_FILE
from miner.jobs.shorten import shorten


@dataclass(frozen=True, slots=True)
class AttemptFolder:
    path: Path

    @property
    def run(self) -> Path:
        return self.path / RUN_FILE

    @property
    def plan(self) -> Path:
        return self.path / PLAN_FILE

    @property
    def config(self) -> Path:
        return self.path / "config"

    @property
    def command(self) -> Path:
        return self.path / "command.txt"

    @property
    def environment(self) -> Path:
        return self.path / "environment.txt"

    @property
    def log(self) -> Path:
        return self.path / LOG_FILE

    @property
    def progress(self) -> Path:
        return self.path / PROGRESS_FILE

    @property
    def result(self) -> Path:
        return self.path / RESULT_FILE

    @property
    def told_run(self) -> Path:
        """The daemon's own copy: a training can write to its folder, and what the daemon goes by later must
        not be its word."""
        return self.path.parent / "told" / f"{self.path.name}.run.json"

    @property
    def told_plan(self) -> Path:
        return self.path.parent / "told" / f"{self.path.name}.plan.json"

    @property
    def stop(self) -> Path:
        return self.path / STOP_FILE

    @property
    def work(self) -> Path:
        return self.path / "work"

    @property
    def submission(self) -> Path:
        return self.path / "submission"

    def make(self) -> None:
        self.config.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(exist_ok=True)
        self.told_run.parent.mkdir(exist_ok=True)


@dataclass(frozen=True, slots=True)
class JobFolder:
    path: Path

    @property
    def inputs(self) -> Path:
        return self.path / "inputs"

    @property
    def submission(self) -> Path:
        return self.path / "submission"

    @property
    def published(self) -> Path:
        return self.path / "published.json"

    @property
    def latest(self) -> Path:
        return self.path / "latest"

    def attempt(self, number: int) -> AttemptFolder:
        return AttemptFolder(self.path / f"attempt_{number}")

    def point_latest(self, number: int) -> None:
        """By rename: there is no instant without a `latest`."""
        beside = self.path / ".latest"
        beside.unlink(missing_ok=True)
        beside.symlink_to(f"attempt_{number}")
        os.replace(beside, self.latest)

    def strip(self) -> int:
        """Remove what is large: inputs, models, checkpoints, the middle of long logs. Plans, results and the
        rest of the logs stay. Bytes freed."""
        freed = sum(shorten(log, mark=True) for log in self.path.glob(f"attempt_*/{LOG_FILE}*"))
        freed += sum(shorten(told, mark=False) for told in self.path.glob(f"attempt_*/{PROGRESS_FILE}"))
        for place in (self.inputs, *self.path.glob("attempt_*/work"), *self._submissions()):
            freed += remove_tree(place)
        return freed

    def _submissions(self) -> list[Path]:
        """Also refused ones, and what a kill left of one that was being put in place or copied."""
        names = ("submission*", ".submission*")
        return [one for name in names for at in ("", "attempt_*/") for one in self.path.glob(at + name)]


def job_folder(data_dir: Path, job_id: int) -> JobFolder:
    return JobFolder(data_dir / "jobs" / str(job_id))


def write(path: Path, text: str) -> None:
    """What a training and a restart go by; readable for the user that trainings run as."""
    write_atomically(path, text.encode(), mode=0o644)
