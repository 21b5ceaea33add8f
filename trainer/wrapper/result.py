"""The last word of a run: a result file always, and exit code 0 exactly when a submission lies at its
place."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from statistics import median

from core.progress import EndEvent, StepEvent, events_in
from core.run_files import RunEnd, RunResult, RunSpec, Score
from trainer.callbacks.report import Report
from trainer.callbacks.submission import Submission
from trainer.sheet import write_whole

log = logging.getLogger(__name__)


def conclude(
    run: RunSpec,
    end: RunEnd,
    detail: str,
    *,
    best: Score | None = None,
    base: Score | None = None,
    steps: int = 0,
    moment: str | None = None,
) -> RunResult:
    """Writes the result and says the end. What lies at the submission's place is looked at, not
    remembered. Nothing in here fails: the exit code is what a validator goes by."""
    speed, memory = _measured(Path(run.progress_path))
    submission = Submission(Path(run.submission_dir), run.model_id, Path(run.model_path), run.task_type)
    result = RunResult(
        end=end,
        submission=submission.exists,
        detail=detail[:4000],
        best=submission.score or best,
        base=base,
        steps=steps,
        seconds=max(time.time() - run.began_at, 0.0),
        tokens_s=speed,
        memory_bytes=memory,
        moment=moment,
    )
    path = Path(run.result_path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, result)
    except OSError as error:
        # A full disk takes the file with the reason, which the log has too; the submission is still whole.
        log.error("%s: the result is not written: %s", path, error)
    Report(Path(run.progress_path)).say(
        EndEvent(t=time.time(), end=end, submission=result.submission, text=detail[:2000])
    )
    return result


def _measured(progress: Path) -> tuple[float | None, int | None]:
    """Tokens per second and the peak of memory, as the steps have reported them."""
    try:
        with progress.open("rb") as lines:
            found = [event for line in lines for event, _ in events_in(line) if isinstance(event, StepEvent)]
    except OSError:
        return None, None
    speeds = [step.tokens_s for step in found if step.tokens_s is not None]
    peaks = [step.memory_bytes for step in found if step.memory_bytes is not None]
    return median(speeds) if speeds else None, max(peaks, default=None)
