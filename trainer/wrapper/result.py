"""The last word of a run: a result file always, and exit code 0 exactly when a submission lies at its
place."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from core.progress import EndEvent
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
    submission = Submission(Path(run.submission_dir), run.model_id, Path(run.model_path), run.task_type)
    result = RunResult(
        end=end,
        submission=submission.exists,
        detail=detail[:4000],
        best=submission.score or best,
        base=base,
        steps=steps,
        seconds=max(time.time() - run.began_at, 0.0),
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
