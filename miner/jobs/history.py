"""Traces of a job's attempts: how they ended, the last plan and checkpoint, models, the best one.

A snapshot of the best model is taken before publishing. The trainer renames new submissions in meanwhile;
the copy from `core.submission` never mixes two of them.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from core.domain.job_states import EndReason, StepFailed
from core.domain.keys import nodes_of
from core.domain.wire import MinerSubmission
from core.planning.plan import TrainingPlan
from core.runs.remedies import AttemptFailure, can_resume
from core.runs.run_files import HeldOutScore, RunResult
from core.submission.faults import BadSubmission
from core.submission.folder import FileIdentity
from core.submission.folder import file_identity as identity_of
from core.submission.swap import take_snapshot
from core.system.files import remove_tree
from miner.jobs.folder import AttemptFolder, JobFolder, write_attempt_file
from miner.jobs.progress import ProgressTail, RunProgress
from miner.store.attempts import AttemptRow
from miner.support.untrusted_files import read_untrusted

#: Directory of a submission that its check has refused.
REFUSED_FOLDER = "submission.refused"
#: Ends after which the next attempt is made on other nodes, if there are any.
_NODE_FAULTS = (EndReason.NODE_FAILED, EndReason.NOT_STARTED, EndReason.GPU_LOST)
#: One snapshot of each directory at a time; a few dozen bytes a job.
_snapshot_locks: dict[Path, threading.Lock] = {}


@dataclass(frozen=True, slots=True)
class ModelCandidate:
    attempt: int
    folder: Path
    score: HeldOutScore | None

    def beats(self, other: ModelCandidate | PublishedModel | None) -> bool:
        """By score; without comparable scores a later attempt wins, and a score wins over none."""
        if other is None:
            return True
        if self.score is None or other.score is None or self.score.metric != other.score.metric:
            return (self.score is not None, self.attempt) > (other.score is not None, other.attempt)
        return self.score.beats(other.score)


def is_model(folder: Path) -> bool:
    """Return True for a directory that could be a model: a training can put a link in its place."""
    return folder.is_dir() and not folder.is_symlink()


def best_candidate(candidates: Iterable[ModelCandidate]) -> ModelCandidate | None:
    best: ModelCandidate | None = None
    for candidate in candidates:
        if is_model(candidate.folder) and candidate.beats(best):
            best = candidate
    return best


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """The snapshot of this job that is on the hub; the store has the repository and hash only."""

    identity: FileIdentity
    attempt: int
    score: HeldOutScore | None
    repo: str
    model_hash: str | None

    def save(self, folder: JobFolder) -> None:
        content = {
            "identity": list(self.identity),
            "attempt": self.attempt,
            "score": self.score.model_dump() if self.score else None,
            "repo": self.repo,
            "model_hash": self.model_hash,
        }
        write_attempt_file(folder.published, json.dumps(content) + "\n")

    @classmethod
    def load(cls, folder: JobFolder) -> PublishedModel | None:
        """Read the file; return None if it is invalid too: publishing the model again changes nothing."""
        try:
            content = json.loads(read_untrusted(folder.published, 64 * 1024) or b"")
            score = HeldOutScore.model_validate(content["score"]) if content["score"] else None
            device, inode, size, written = content["identity"]
            identity = (device, inode, size, written)
            # A file of 0.1.0 has no hash; its score still keeps a worse model from replacing this one.
            return cls(identity, content["attempt"], score, content["repo"], content.get("model_hash"))
        except (ValueError, KeyError, TypeError, OSError):
            return None

    def is_of(self, candidate: ModelCandidate, submission: MinerSubmission | None, repo_name: str) -> bool:
        """Return True if the hub has this very model under this name.

        A submission without a hash was being replaced when that was interrupted: what the hub has is unknown.
        One with another hash was replaced, and this record of it was not written any more.
        """
        if submission is None or submission.model_hash is None:
            return False
        if (submission.repo, submission.model_hash) != (self.repo, self.model_hash):
            return False
        return self.repo.endswith(f"/{repo_name}") and self.identity == folder_identity(candidate.folder)


def best_model_of(rows: Sequence[AttemptRow]) -> ModelCandidate | None:
    return best_candidate(model_candidates(rows))


def folder_identity(folder: Path) -> FileIdentity | None:
    """Changes whenever another directory was renamed into this place."""
    try:
        return identity_of(os.lstat(folder))
    except OSError:
        return None


def snapshot_best(source: Path, target: Path) -> FileIdentity:
    """Copy `source` to `target` as it is now; return its identity. `StepFailed` when it is unusable."""
    # An early upload that was cancelled may still be copying in its thread.
    with _snapshot_locks.setdefault(target, threading.Lock()):
        try:
            return take_snapshot(source, target)
        except BadSubmission as error:
            raise StepFailed(EndReason.BAD_SUBMISSION, str(error)) from None
        except OSError as error:
            raise _snapshot_failure(error, source) from error


def _snapshot_failure(error: OSError, source: Path) -> StepFailed:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StepFailed(EndReason.DISK_FULL, f"no room for a snapshot of {source}: {error.strerror}")
    return StepFailed(EndReason.BAD_SUBMISSION, f"{source} cannot be read: {error}")


def put_refused_aside(candidate: ModelCandidate) -> None:
    """Move a submission that its check has refused aside, for the operator to look at."""
    aside = candidate.folder.with_name(REFUSED_FOLDER)
    remove_tree(aside)
    os.replace(candidate.folder, aside)


_MAX_RESULT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class AttemptHistory:
    """The attempts since the job's last start, unless it says otherwise."""

    #: Counts all attempts: a number, like a key, is used once.
    next_number: int
    failures: tuple[AttemptFailure, ...] = ()
    plan: TrainingPlan | None = None
    gpus: tuple[str, ...] = ()
    #: Nodes of a cluster that failed, or could not begin an attempt.
    bad_nodes: frozenset[str] = frozenset()
    checkpoint: Path | None = None
    oom_moment: str = "train"
    #: Sequences of a pass, where a rule had made them more than planned.
    grown_micro: int | None = None

    @property
    def ended_by(self) -> EndReason | None:
        return self.failures[-1].reason if self.failures else None

    def resumable(self, plan: TrainingPlan) -> Path | None:
        """The last checkpoint, if `plan` can go on from it."""
        if self.checkpoint is None or self.plan is None or self.ended_by is None:
            return None
        return self.checkpoint if can_resume(self.plan, plan, self.ended_by) else None

    @property
    def reasons(self) -> tuple[EndReason, ...]:
        return tuple(failure.reason for failure in self.failures)


def history_of(rows: Sequence[AttemptRow], counted_from: int) -> AttemptHistory:
    next_number = rows[-1].number + 1 if rows else 1
    ended = [row for row in rows if row.number > counted_from and row.end_reason is not None]
    if not ended:
        return AttemptHistory(next_number)
    last = AttemptFolder(ended[-1].folder)
    progress = progress_of(last, ended[-1].started_at)
    result, plan = read_result(last), read_plan(last)
    return AttemptHistory(
        next_number,
        failures=tuple(AttemptFailure(row.end_reason, row.detail) for row in ended if row.end_reason),
        plan=plan,
        gpus=ended[-1].gpus,
        bad_nodes=frozenset(
            node for row in ended if row.end_reason in _NODE_FAULTS for node in nodes_of(row.gpus) if node
        ),
        checkpoint=_newest_checkpoint(ended),
        oom_moment=(result.moment if result else None) or (progress.oom.moment if progress.oom else "train"),
        grown_micro=progress.grown_micro(plan.batch.micro) if plan else None,
    )


def _newest_checkpoint(ended: Sequence[AttemptRow]) -> Path | None:
    """Find it among the attempts since the last NaN: a checkpoint saved before may be poisoned already."""
    for row in reversed(ended):
        if row.end_reason is EndReason.NAN:
            break
        folder = AttemptFolder(row.folder)
        if checkpoint := last_checkpoint(folder, progress_of(folder, row.started_at)):
            return checkpoint
    return None


def last_checkpoint(folder: AttemptFolder, progress: RunProgress) -> Path | None:
    """The last reported checkpoint, if it is in the attempt's own directory: a training can name any path."""
    if progress.checkpoint is None:
        return None
    try:
        real = Path(progress.checkpoint.path).resolve(strict=True)
        if real.is_dir() and real.is_relative_to(folder.work.resolve()):
            return real
    except (OSError, ValueError, RuntimeError):
        return None
    return None


def model_candidates(rows: Sequence[AttemptRow]) -> list[ModelCandidate]:
    """The models of all attempts, also of those before the last start."""
    candidates = []
    for row in rows:
        folder = AttemptFolder(row.folder)
        if is_model(folder.submission):
            event = progress_of(folder, row.started_at).submission
            candidates.append(ModelCandidate(row.number, folder.submission, event.score if event else None))
    return candidates


def progress_of(folder: AttemptFolder, began_at: float) -> RunProgress:
    progress = RunProgress(began_at)
    for event in ProgressTail(folder.progress).read_all():
        progress.add(event, event.t)
    return progress


def read_result(folder: AttemptFolder) -> RunResult | None:
    """Read the trainer's result, or return None if it is missing or invalid."""
    data = read_untrusted(folder.result, _MAX_RESULT_BYTES)
    if data is None:
        return None
    try:
        return RunResult.model_validate_json(data)
    except ValidationError:
        return None


def read_plan(folder: AttemptFolder) -> TrainingPlan | None:
    """Read the plan as the daemon wrote it, or return None if it is gone or of another version."""
    try:
        return TrainingPlan.from_json(folder.given_plan.read_bytes())
    except (OSError, ValueError):
        return None
