"""Which of a job's models is the best, and a snapshot of it that nobody else writes to.

The trainer renames a new submission in while we look: `core.submission.place` takes copies that never mix
two.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from core.files import remove_tree
from core.run_files import Score
from core.submission.faults import BadSubmission
from core.submission.folder import Identity
from core.submission.folder import identity as identity_of
from core.submission.place import freeze
from core.wire import MinerSubmission
from miner.jobs.folder import JobFolder, write
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason
from miner.watch import files

#: A submission that its check refused is put aside under this name.
REFUSED = "submission.refused"
#: One snapshot at a time of each place; a few dozen bytes a job.
_taking: dict[Path, threading.Lock] = {}


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


def is_model(folder: Path) -> bool:
    """Whether something lies there that could be one: a training can put a link in its place."""
    return folder.is_dir() and not folder.is_symlink()


def best_of(candidates: Iterable[Candidate]) -> Candidate | None:
    best: Candidate | None = None
    for one in candidates:
        if is_model(one.folder) and one.beats(best):
            best = one
    return best


@dataclass(frozen=True, slots=True)
class Published:
    """What of this job is on the hub, beside the books: which snapshot it was."""

    identity: Identity
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
            device, inode, size, written = told["identity"]
            return cls((device, inode, size, written), told["attempt"], score, told["repo"])
        except (ValueError, KeyError, TypeError, OSError):
            return None

    def is_of(self, candidate: Candidate, made: MinerSubmission | None, repo_name: str) -> bool:
        """Whether the hub has this very model under this name. A submission without a hash was being replaced
        when something ended that: what lies there is not known."""
        if made is None or made.model_hash is None or made.repo != self.repo:
            return False
        return self.repo.endswith(f"/{repo_name}") and self.identity == identity(candidate.folder)


def identity(folder: Path) -> Identity | None:
    """Another one whenever another folder was renamed in."""
    try:
        return identity_of(os.lstat(folder))
    except OSError:
        return None


def snapshot(source: Path, target: Path) -> Identity:
    """`target` becomes what `source` is now; the identity of that. `StepFailed` when there is nothing sound
    to take."""
    # An early upload that was cancelled may still be copying in its thread.
    with _taking.setdefault(target, threading.Lock()):
        try:
            return freeze(source, target)
        except BadSubmission as error:
            raise StepFailed(EndReason.BAD_SUBMISSION, str(error)) from None
        except OSError as error:
            raise _told(error, source) from error


def _told(error: OSError, source: Path) -> StepFailed:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StepFailed(EndReason.DISK_FULL, f"no room for a snapshot of {source}: {error.strerror}")
    return StepFailed(EndReason.BAD_SUBMISSION, f"{source} can't be read: {error}")


def refuse(candidate: Candidate) -> None:
    """Put a submission that its check refused aside, to be looked at."""
    aside = candidate.folder.with_name(REFUSED)
    remove_tree(aside)
    os.replace(candidate.folder, aside)
