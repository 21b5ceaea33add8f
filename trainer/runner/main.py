"""From a command line to an exit code, with a result file whatever happens in between.

The exit code is 0 exactly when a submission lies at its place.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Protocol

from core.domain.errors import GodMinerError
from core.domain.evaluation import Era
from core.runs.progress import EndEvent, StepEvent, parse_events
from core.runs.run_files import RunResult, RunSpec, TrainerExitCode
from core.system.wrapper import adopt_orphans
from trainer.handoff import TrainingOutcome, write_record
from trainer.runner.command_line import UsageError
from trainer.runner.machines import Follower, Machine
from trainer.runner.processes import StopRequest, kill_descendants
from trainer.runner.public_log import public_log
from trainer.runner.supervise import LaunchResult
from trainer.session.failures import end_of
from trainer.session.progress_log import ProgressLog
from trainer.session.submission import Submission

log = logging.getLogger(__name__)


def write_result(run: RunSpec, launch: LaunchResult, *, steps: int = 0) -> RunResult:
    """Write the result file and the end event; `steps` of a launch without an outcome.

    Whether there is a submission is looked up, not remembered. Nothing in here fails: the exit code is what a
    validator goes by."""
    speed, memory = _measured(Path(run.progress_path))
    submission = Submission(
        Path(run.submission_dir), run.model_id, Path(run.model_path), run.task_type, run.image_type
    )
    outcome = launch.outcome or TrainingOutcome(end=launch.end, steps=steps)
    result = RunResult(
        end=launch.end,
        submission=submission.exists,
        detail=launch.detail[:4000],
        best=submission.score or outcome.best,
        base=outcome.base,
        steps=outcome.steps,
        seconds=max(time.time() - run.began_at, 0.0),
        tokens_s=speed,
        memory_bytes=memory,
        moment=launch.moment,
    )
    path = Path(run.result_path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_record(path, result)
    except OSError as error:
        # A full disk takes the file with the reason, which the log has too; the submission is still whole.
        log.error("%s: the result is not written: %s", path, error)
    ProgressLog(Path(run.progress_path)).write(
        EndEvent(t=time.time(), end=result.end, submission=result.submission, text=result.detail[:2000])
    )
    return result


def _measured(progress: Path) -> tuple[float | None, int | None]:
    """Tokens per second and the peak of memory, as the steps have reported them."""
    try:
        with progress.open("rb") as lines:
            steps = [
                event for line in lines for event, _ in parse_events(line) if isinstance(event, StepEvent)
            ]
    except OSError:
        return None, None
    speeds = [step.tokens_s for step in steps if step.tokens_s is not None]
    peaks = [step.memory_bytes for step in steps if step.memory_bytes is not None]
    return median(speeds) if speeds else None, max(peaks, default=None)


class Runner(Protocol):
    def execute(self) -> RunResult: ...


def run_to_end(
    parse: Callable[[Sequence[str]], RunSpec],
    runner: Callable[[RunSpec, StopRequest, bool], Runner],
    arguments: Sequence[str],
) -> int:
    """`runner` is also told whether it may retry a failed training itself."""
    run = _parsed(parse, arguments)
    if run is None:
        return int(TrainerExitCode.USAGE)
    stop = StopRequest(Path(run.stop_path))
    stop.listen()
    adopt_orphans()
    with ExitStack() as stack:
        public = None
        try:
            _make_folders(run)
            if _is_public(run):
                public = stack.enter_context(public_log(Path(run.work_dir), Path(run.progress_path)))
            result = runner(run, stop, retries_here(run)).execute()
        except Exception as error:  # noqa: BLE001 - whatever it is, the result file has the traceback
            result = _failed(run, error)
        finally:
            kill_descendants()
        log.info("%s: %s", result.end, result.detail or "no details")
        if public is not None:
            public.end(result)
    return int(result.exit_code)


def follow_to_end(
    parse: Callable[[Sequence[str]], RunSpec], machine: Machine, arguments: Sequence[str]
) -> int:
    """Be one of the machines after the first: it reports nothing, and ends with the first."""
    run = _parsed(parse, arguments)
    if run is None:
        return int(TrainerExitCode.USAGE)
    os.umask(0o022)
    stop = StopRequest(Path(run.stop_path))
    stop.listen()
    adopt_orphans()
    try:
        return int(Follower(run, machine, stop).execute())
    except Exception:  # whatever it is, the scheduler ends the other machines for the exit code
        log.exception("machine %d ends with an error", machine.rank)
        return int(TrainerExitCode.CRASHED)
    finally:
        kill_descendants()


def _parsed(parse: Callable[[Sequence[str]], RunSpec], arguments: Sequence[str]) -> RunSpec | None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        return parse(arguments)
    except UsageError as error:
        log.error("%s", error)
        return None


def _is_public(run: RunSpec) -> bool:
    """Whether competitors read what is printed: in a tournament, not with a daemon."""
    return run.era is Era.TOURNAMENTS and run.plan_path is None


def retries_here(run: RunSpec) -> bool:
    """A daemon starts new attempts itself; in a tournament a failure is final."""
    return run.plan_path is None or run.era is Era.TOURNAMENTS


def _make_folders(run: RunSpec) -> None:
    # Files are for whoever uploads them, not only for the user that the container happens to run as.
    os.umask(0o022)
    if _is_public(run):
        # A validator's second attempt finds the first one's volume: its outcome and its request to stop are
        # not this one's. The submission beside it stays; so does a folder that is not ours.
        earlier = (run.progress_path, run.result_path, run.stop_path)
        if any(Path(path).parent == Path(run.work_dir) and Path(path).exists() for path in earlier):
            shutil.rmtree(run.work_dir, ignore_errors=True)
    Path(run.work_dir).mkdir(parents=True, exist_ok=True)
    for path in (run.progress_path, run.result_path, run.submission_dir, run.stop_path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)


def _failed(run: RunSpec, error: Exception) -> RunResult:
    log.error("the run ends with an error", exc_info=error)
    text = str(error) if isinstance(error, GodMinerError) else "".join(traceback.format_exception(error))
    return write_result(run, LaunchResult(end_of(error), text))
