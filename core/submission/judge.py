"""The whole way at once: for commands, and for the trainer, which puts nothing in place unjudged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from core.submission.check import Base, Report, Weigh, examine
from core.submission.faults import BadSubmission, Fault
from core.submission.folder import listing
from core.submission.model_hash import counts, model_hash
from core.submission.place import put_in_place
from core.submission.prepare import Prepared, mend_in_place, prepare
from core.submission.weigh import Told, weigh
from core.tasks import TaskType


@dataclass(frozen=True, slots=True)
class Judged:
    prepared: Prepared
    report: Report
    faults: tuple[Fault, ...]


def judge(
    folder: Path,
    base: Base,
    task_type: TaskType | None = None,
    *,
    as_is: bool = False,
    keep_card: bool = False,
    told: Told | None = None,
    weighed_by: Weigh = weigh,
) -> Judged:
    """Whether `folder` can be published. With `as_is` nothing is mended or left out for it: a tournament's
    uploader takes everything that lies in the folder. `BadSubmission` for what is no folder."""
    prepared = prepare(folder, Base() if as_is else base, task_type, keep_card=keep_card)
    report = examine(prepared.items, prepared.kind, base, told=told, weighed_by=weighed_by)
    strays = prepared.left_out if as_is else ()
    return Judged(prepared, report, (*report.faults, *strays))


def complete(new: Path, place: Path, base: Base, task_type: TaskType) -> Report:
    """For the trainer: mend the folder that it wrote, judge it as strictly as a tournament would, and make it
    the submission at `place`. `BadSubmission`, and nothing has changed at `place`, when it is not good."""
    mend_in_place(new, base, task_type)
    judged = judge(new, base, task_type, as_is=True)
    if judged.faults:
        raise BadSubmission(str(new), judged.faults)
    put_in_place(new, place)
    return judged.report


def hash_of(folder: Path, told: Told | None = None) -> str | None:
    """The fingerprint that a validator takes of these very files."""
    found = {}
    for entry in listing(folder).files:
        if counts(entry.path) and entry.size:
            seen = weigh(folder / entry.path, told, plain=True)
            found[entry.path] = (seen.size, seen.sha256)
    return model_hash(found)
