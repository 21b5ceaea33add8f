"""Choice of the file of an image run to submit: the best of several by the evaluator's own measure.

The engine has ended and its last file is the submission already. Another process of the engine's Python
(`trainer.scoring.pictures`) loads the base and scores some files on a few pictures. Its report counts only if
it has all of them: whatever fails or takes too long leaves the last file where it is.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from core.data.pictures import PICTURE_SUFFIXES
from core.planning.plan import CheckpointChoice
from core.runs.run_files import RunEnd
from trainer.inputs.images import PreparedImages
from trainer.runner.processes import StopRequest
from trainer.runner.supervise import SupervisedProcess, SupervisionLimits, Termination, supervise
from trainer.session.progress_log import ProgressLog

#: Losses that differ by less are equal: miners with one recipe differ by 2 %, and the later file has seen
#: more.
NOISE = 0.005
#: Pictures that must be left to train on where some are held out, and the part that may be held out.
LEAST_TRAINED, MOST_HELD_OUT = 12, 0.2
#: The comparison may take so much longer than planned, as far as the time is there.
OVERRUN = 1.5
#: With less of its planned time left it does not begin.
LEAST_SHARE = 0.25


class Picture(NamedTuple):
    path: Path
    caption: str


def picture_of(path: Path) -> Picture:
    try:
        caption = path.with_suffix(".txt").read_text("utf-8", errors="replace").strip()
    except OSError:
        caption = ""
    return Picture(path, caption)


def pictures_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURE_SUFFIXES)


def hold_out(images: PreparedImages, count: int) -> Path | None:
    """Move some pictures with their captions out of the training's folder, the same ones each time, whatever
    their names. Return None if too few would be left."""
    paths = pictures_in(images.folder)
    if count > MOST_HELD_OUT * len(paths) or len(paths) - count < LEAST_TRAINED:
        return None
    folder = images.parent.parent / "held-out"
    folder.mkdir(exist_ok=True)
    by_content = sorted(paths, key=lambda path: (hashlib.sha256(path.read_bytes()).digest(), path.name))
    for path in by_content[:count]:
        caption = path.with_suffix(".txt")
        for file in (path, caption):
            if file.exists():
                shutil.move(file, folder / file.name)
    return folder


def spread(items: Sequence[Path], count: int) -> list[Path]:
    """Pick `count` items, evenly spread, the last among them."""
    count = min(count, len(items))
    return [items[math.ceil((at + 1) * len(items) / count) - 1] for at in range(count)]


@dataclass(frozen=True)
class ScoringJob:
    """Order for the scoring process, which reads it as JSON."""

    engine: str
    engine_dir: str
    config: str
    family: str
    files: list[str]
    pictures: list[dict[str, str]]
    seeds: int
    deadline: float
    report: str
    device: str


#: From the deadline until the scoring process is ended: it writes its report.
GRACE_S = 2.0


def score_files(
    job: ScoringJob,
    start: Callable[[Path], SupervisedProcess],
    stop: StopRequest,
    progress: ProgressLog,
) -> tuple[dict[str, float], str]:
    """Run the scoring process to its end; the losses by file, and why there are not all of them."""
    report = Path(job.report)
    path = report.with_name("scoring.json")
    path.write_text(json.dumps(asdict(job), indent=1), encoding="utf-8")
    noted: set[str] = set()

    def note_new() -> Termination | None:
        for file, loss in read_scores(report)[0].items():
            if file not in noted:
                noted.add(file)
                progress.note("choice", f"{Path(file).name} scores {loss:.5f}")
        return None

    # It is quiet while it renders, and has a deadline.
    limits = SupervisionLimits(
        job.deadline + GRACE_S, hang_s=math.inf, doing=lambda: "while files were compared", more=note_new
    )
    ended = supervise(start(path), limits, stop)
    note_new()
    scores, missing = read_scores(report)
    if ended.termination is not None:
        late = ended.termination.end is RunEnd.CLOCK
        missing = "the comparison took longer than its time" if late else ended.termination.detail
    elif ended.code != 0:
        last = next((line for line in reversed(ended.tail) if line.strip()), "")
        missing = f"{missing or 'it failed'} (exit code {ended.code}; {last})"
    return scores, missing


def read_scores(report: Path) -> tuple[dict[str, float], str]:
    """The losses so far by file, and why there are not all of them; "" if there are."""
    try:
        document = json.loads(report.read_text("utf-8"))
        scores = {str(file["path"]): float(file["loss"]) for file in document["files"]}
        complete, reason = document["complete"] is True, str(document.get("reason") or "")
    except (OSError, ValueError, KeyError, TypeError):
        return {}, "there is no report"
    return scores, "" if complete else reason or "the report is not complete"


def best_of(files: Sequence[Path], scores: Mapping[str, float]) -> Path | None:
    """`files` oldest first. Of those within the noise of the best the latest; None if one has no score."""
    losses = [scores.get(str(path), math.nan) for path in files]
    if not losses or not all(math.isfinite(loss) for loss in losses):
        return None
    limit = min(losses) * (1 + NOISE)
    return next(path for path, loss in reversed(list(zip(files, losses, strict=True))) if loss <= limit)


def describe_scores(files: Sequence[Path], scores: Mapping[str, float]) -> str:
    return ", ".join(f"{path.name} {scores[str(path)]:.5f}" for path in files if str(path) in scores)


def choice_deadline(choice: CheckpointChoice, now: float, end: float) -> float | None:
    """Return the time at which the comparison must be over, or None if there is no time for it."""
    deadline = min(now + OVERRUN * choice.seconds, end)
    return deadline if deadline - now >= LEAST_SHARE * choice.seconds else None
