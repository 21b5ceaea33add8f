"""A job's directory on disk, and the cleaner that strips those of finished jobs.

    jobs/7/inputs/           as fetched, read-only to trainings
           orders/           what each attempt was given, run and plan: only the daemon writes here
           submission/       a snapshot of the best model so far, likewise
           published.json    what of it is on the hub
           attempt_1/        run.json plan.json config/ command.txt environment.txt log progress.jsonl
                             result.json start.json exit.json stop control.json submission/ work/
           latest            -> attempt_1

Every attempt has a `submission/` of its own: the trainer of a later one begins without a score to beat
and would replace a better model by a worse one. Of a finished job the plans, logs and results stay; inputs,
models and checkpoints are removed after a while, or at once when the disk is full.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

from core.domain.units import show_bytes
from core.runs.run_files import (
    CONTROL_FILE,
    LOG_FILE,
    PLAN_FILE,
    PROGRESS_FILE,
    RESULT_FILE,
    RUN_FILE,
    STOP_FILE,
)
from core.system.files import remove_tree, write_atomically
from miner.store.jobs import jobs_finished_before
from miner.store.store import Store

log = logging.getLogger(__name__)

#: A training may write two hundred megabytes; what anybody needs a week later is in this much of it.
MAX_LOG_BYTES = 1 << 20
_HEAD_SHARE = 4


def shorten_log(path: Path, *, mark: bool, most: int = MAX_LOG_BYTES) -> int:
    """Keep whole lines of the beginning and, three times as much, of the end; return the bytes freed.

    With `mark` a line between says what is missing. A training could write to the directory: a link is not
    followed.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return 0
    with os.fdopen(file, "rb") as opened:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size <= most:
            return 0
        head = opened.read(most // _HEAD_SHARE)
        opened.seek(status.st_size - (most - len(head)))
        tail = opened.read()
    head = head[: head.rfind(b"\n") + 1]
    tail = tail[tail.find(b"\n") + 1 :]
    gone = status.st_size - len(head) - len(tail)
    between = f"[{gone:,} bytes were removed here]\n".encode() if mark else b""
    partial = path.with_name(f".{path.name}.short")
    partial.unlink(missing_ok=True)
    partial.write_bytes(head + between + tail)
    os.replace(partial, path)
    return gone - len(between)


class AttemptFolder:
    def __init__(self, folder: str | Path) -> None:
        self.path = path = Path(folder)
        self.run = path / RUN_FILE
        self.plan = path / PLAN_FILE
        self.config = path / "config"
        self.command = path / "command.txt"
        self.environment = path / "environment.txt"
        self.log = path / LOG_FILE
        self.progress = path / PROGRESS_FILE
        self.result = path / RESULT_FILE
        self.stop = path / STOP_FILE
        self.control = path / CONTROL_FILE
        self.work = path / "work"
        self.submission = path / "submission"
        #: The daemon's own copies: a training can change its directory, which nothing may rely on then.
        self.given_run = path.parent / "orders" / f"{path.name}.run.json"
        self.given_plan = path.parent / "orders" / f"{path.name}.plan.json"

    def create(self) -> None:
        self.config.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(exist_ok=True)
        self.given_run.parent.mkdir(exist_ok=True)


class JobFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.inputs = path / "inputs"
        self.submission = path / "submission"
        self.published = path / "published.json"
        self.latest = path / "latest"

    def attempt(self, number: int) -> AttemptFolder:
        return AttemptFolder(self.path / f"attempt_{number}")

    def point_latest(self, number: int) -> None:
        """By rename, so that `latest` exists at any moment."""
        new = self.path / ".latest"
        new.unlink(missing_ok=True)
        new.symlink_to(f"attempt_{number}")
        os.replace(new, self.latest)

    def remove_earlier_work(self, number: int, keep: Path | None) -> None:
        """Remove the scratch of attempts before `number`, which would fill the disk, but not the checkpoint
        `keep`."""
        for earlier in range(1, number):
            work = self.attempt(earlier).work
            if keep is None or not keep.is_relative_to(work):
                remove_tree(work)

    def strip(self) -> int:
        """Remove inputs, models, checkpoints and the middle of long logs; return the bytes freed.

        Plans, results and the rest of the logs stay.
        """
        freed = sum(shorten_log(path, mark=True) for path in self.path.glob(f"attempt_*/{LOG_FILE}*"))
        freed += sum(shorten_log(path, mark=False) for path in self.path.glob(f"attempt_*/{PROGRESS_FILE}"))
        for path in (self.inputs, *self.path.glob("attempt_*/work"), *self._submissions()):
            freed += remove_tree(path)
        return freed

    def _submissions(self) -> list[Path]:
        """Include refused submissions and partial copies left by a kill."""
        patterns = ("submission*", ".submission*", "attempt_*/submission*", "attempt_*/.submission*")
        return [path for pattern in patterns for path in self.path.glob(pattern)]


def job_folder(data_dir: Path, job_id: int) -> JobFolder:
    return JobFolder(data_dir / "jobs" / str(job_id))


def write_attempt_file(path: Path, text: str) -> None:
    """Write a file that a training or a restart reads, readable for the user that trainings run as."""
    write_atomically(path, text.encode(), mode=0o644)


class FinishedJobCleaner:
    def __init__(self, data_dir: Path, store: Store, *, keep_s: float, clock: Callable[[], float]) -> None:
        self._data_dir, self._store, self._keep_s, self._clock = data_dir, store, keep_s, clock
        #: Jobs already stripped: looking through a thousand directories again and again is not free.
        self._stripped: set[int] = set()
        #: Jobs that were started again during a clean-up.
        self._revived: set[int] = set()
        self._busy = asyncio.Lock()

    async def remove_expired(self) -> int:
        """Remove the files of jobs that ended long enough ago; return the bytes freed."""
        return await self._strip(self._clock() - self._keep_s)

    async def remove_all_finished(self) -> int:
        """The disk is full: remove the files of every job that is over; return the bytes freed."""
        return await self._strip(self._clock())

    async def _strip(self, over_by: float) -> int:
        freed = 0
        async with self._busy:
            self._revived.clear()
            jobs = await self._store.read(jobs_finished_before, over_by)
            for job_id in jobs:  # terabytes take minutes, in which a validator may start one of them again
                if job_id not in self._stripped and job_id not in self._revived:
                    self._stripped.add(job_id)
                    freed += await asyncio.to_thread(self._strip_one, job_id)
        if freed:
            log.info("removed %s of finished jobs", show_bytes(freed))
        return freed

    def _strip_one(self, job_id: int) -> int:
        try:
            return job_folder(self._data_dir, job_id).strip()
        except OSError as error:
            log.warning("the files of job %d cannot be removed: %s", job_id, error)
            return 0

    def revived(self, job_id: int) -> None:
        """The job was started again: spare its files."""
        self._stripped.discard(job_id)
        self._revived.add(job_id)
