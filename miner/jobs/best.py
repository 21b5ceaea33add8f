"""Which of a job's models is the best, and a snapshot of it that nobody else writes to.

The trainer renames a new submission in while we look, and a training is not to be trusted with a path: so
the snapshot is made of the regular files found, by hard links (a copy where those are not to be had), and
thrown away when the folder was replaced meanwhile.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from core.run_files import Score
from core.wire import MinerSubmission
from miner.jobs.folder import JobFolder, remove, write
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason
from miner.watch import files

#: A submission has a handful of files, a sharded model some hundred.
MOST_FILES = 5000
_TRIES = 10
#: A submission that its check refused is put aside under this name.
REFUSED = "submission.refused"


@dataclass(frozen=True, slots=True)
class Candidate:
    attempt: int
    folder: Path
    score: Score | None
    step: int = 0

    def beats(self, other: Candidate | None) -> bool:
        """By score; a later attempt where none of the two has one."""
        if other is None:
            return True
        if self.score is None or other.score is None or self.score.metric != other.score.metric:
            return (self.score is not None, self.attempt) > (other.score is not None, other.attempt)
        return self.score.beats(other.score)


def best_of(candidates: Iterable[Candidate]) -> Candidate | None:
    best: Candidate | None = None
    for one in candidates:
        if one.folder.is_dir() and not one.folder.is_symlink() and one.beats(best):
            best = one
    return best


@dataclass(frozen=True, slots=True)
class Published:
    """What of this job is on the hub, beside the books: which snapshot it was."""

    identity: tuple[int, int, int]
    attempt: int
    score: Score | None
    repo: str

    def save(self, folder: JobFolder) -> None:
        told = {
            "identity": list(self.identity),
            "attempt": self.attempt,
            "score": self.score.model_dump() if self.score else None,
            "repo": self.repo,
        }
        write(folder.published, json.dumps(told) + "\n")

    @classmethod
    def load(cls, folder: JobFolder) -> Published | None:
        """None also for what can't be made sense of: then it is published anew, which changes nothing."""
        try:
            told = json.loads(files.read(folder.published, 64 * 1024) or b"")
            score = Score.model_validate(told["score"]) if told["score"] else None
            one, two, three = told["identity"]
            return cls((one, two, three), told["attempt"], score, told["repo"])
        except (ValueError, KeyError, TypeError, OSError):
            return None

    def is_of(self, candidate: Candidate, made: MinerSubmission | None, repo_name: str) -> bool:
        """Whether the hub has this very model under this name."""
        same_place = made is not None and made.repo == self.repo and self.repo.endswith(f"/{repo_name}")
        return same_place and self.identity == identity(candidate.folder)


def identity(folder: Path) -> tuple[int, int, int] | None:
    """Another one whenever another folder was renamed in."""
    try:
        status = os.lstat(folder)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def snapshot(source: Path, target: Path) -> tuple[int, int, int]:
    """`target` becomes what `source` is now; the identity of that. `StepFailed` when there is nothing sound
    to take."""
    fresh, old = target.with_name(f"{target.name}.new"), target.with_name(f"{target.name}.old")
    for _ in range(_TRIES):
        before = identity(source)
        if before is None or not source.is_dir():
            raise StepFailed(EndReason.BAD_SUBMISSION, f"{source} is not there any more")
        remove(fresh)
        try:
            _links(source, fresh)
        except FileNotFoundError:
            continue  # replaced in the middle
        except OSError as error:
            raise _told(error, source) from error
        if identity(source) == before:
            remove(old)
            if target.exists():
                os.replace(target, old)
            os.replace(fresh, target)
            remove(old)
            return before
    raise StepFailed(EndReason.BAD_SUBMISSION, f"{source} changes faster than it can be read")


def _told(error: OSError, source: Path) -> StepFailed:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StepFailed(EndReason.DISK_FULL, f"no room for a snapshot of {source}: {error.strerror}")
    return StepFailed(EndReason.BAD_SUBMISSION, f"{source} can't be read: {error}")


def _links(source: Path, target: Path) -> None:
    count = 0
    pending = [(source, target)]
    while pending:
        folder, copy = pending.pop()
        copy.mkdir()
        with os.scandir(folder) as entries:
            for entry in entries:
                count += 1
                if count > MOST_FILES:
                    raise StepFailed(EndReason.BAD_SUBMISSION, f"{source} holds more than {MOST_FILES} files")
                if entry.is_dir(follow_symlinks=False):
                    pending.append((Path(entry.path), copy / entry.name))
                elif stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                    _link(entry.path, copy / entry.name)
                else:
                    raise StepFailed(
                        EndReason.BAD_SUBMISSION, f"{entry.path} is a link or no file: a model has none"
                    )


def _link(source: str, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EACCES, errno.EOPNOTSUPP):
            raise
        shutil.copyfile(source, target, follow_symlinks=False)


def refuse(candidate: Candidate) -> None:
    """Put a submission that its check refused aside, to be looked at."""
    aside = candidate.folder.with_name(REFUSED)
    remove(aside)
    os.replace(candidate.folder, aside)
