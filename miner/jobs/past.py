"""What earlier attempts of a job have left: how they ended, their last plan, a checkpoint, models."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from core.plan import TrainingPlan
from core.run_files import RunResult
from miner.jobs.best import Candidate, is_model
from miner.jobs.desk import Desk
from miner.jobs.folder import AttemptFolder
from miner.jobs.states import EndReason
from miner.store.work import AttemptRow
from miner.watch import files
from miner.watch.progress import Course, Tail

_SMALL = 1 << 20
#: Looks at a progress file that is complete: of a gigabyte nobody needs the end.
_LOOKS = 64


@dataclass(frozen=True, slots=True)
class Past:
    """Of this life of the job, unless it says otherwise."""

    #: Of all lives: a number, like a key, is used once.
    next_number: int
    history: tuple[EndReason, ...] = ()
    plan: TrainingPlan | None = None
    gpus: tuple[str, ...] = ()
    checkpoint: Path | None = None
    oom_moment: str = "train"

    @property
    def ended_by(self) -> EndReason | None:
        return self.history[-1] if self.history else None


async def read_past(desk: Desk) -> Past:
    rows = await desk.parts.book.attempts(desk.row.id)
    return await asyncio.to_thread(past_of, rows, desk.row.counted_from)


def past_of(rows: Sequence[AttemptRow], counted_from: int) -> Past:
    next_number = rows[-1].number + 1 if rows else 1
    ended = [row for row in rows if row.number > counted_from and row.end_reason is not None]
    if not ended:
        return Past(next_number)
    last = AttemptFolder(Path(ended[-1].folder))
    course = course_of(last, ended[-1].started_at)
    result = read_result(last)
    return Past(
        next_number,
        history=tuple(row.end_reason for row in ended if row.end_reason is not None),
        plan=read_plan(last),
        gpus=ended[-1].gpus,
        checkpoint=next((found for row in reversed(ended) if (found := _checkpoint(row))), None),
        oom_moment=(result.moment if result else None) or (course.oom.moment if course.oom else "train"),
    )


def _checkpoint(row: AttemptRow) -> Path | None:
    folder = AttemptFolder(Path(row.folder))
    return checkpoint_in(folder, course_of(folder, row.started_at))


def checkpoint_in(folder: AttemptFolder, course: Course) -> Path | None:
    """The last checkpoint told of, if it lies where checkpoints lie: the path is the training's word."""
    if course.checkpoint is None:
        return None
    try:
        real = Path(course.checkpoint.path).resolve(strict=True)
        if real.is_dir() and real.is_relative_to(folder.work.resolve()):
            return real
    except (OSError, ValueError, RuntimeError):
        return None
    return None


def candidates(rows: Sequence[AttemptRow]) -> list[Candidate]:
    """Every attempt's model, of all lives: what was trained once is not worse for a failure since."""
    found = []
    for row in rows:
        folder = AttemptFolder(Path(row.folder))
        if is_model(folder.submission):
            course = course_of(folder, row.started_at)
            told = course.submission
            found.append(
                Candidate(
                    row.number, folder.submission, told.score if told else None, told.step if told else 0
                )
            )
    return found


def course_of(folder: AttemptFolder, began_at: float) -> Course:
    course, tail = Course(began_at), Tail(folder.progress)
    for _ in range(_LOOKS):
        if not (events := tail.read()):
            break
        for event in events:
            course.take(event, event.t)
    return course


def read_result(folder: AttemptFolder) -> RunResult | None:
    """The trainer's last word; None when there is none that can be read."""
    data = files.read(folder.result, _SMALL)
    if data is None:
        return None
    try:
        return RunResult.model_validate_json(data)
    except ValidationError:
        return None


def read_plan(folder: AttemptFolder) -> TrainingPlan | None:
    """As the daemon has told it; None when it is gone or of another version."""
    try:
        return TrainingPlan.from_json(folder.told_plan.read_bytes())
    except (OSError, ValidationError):
        return None
