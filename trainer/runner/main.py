"""From a command line to an exit code, with a result file whatever happens in between.

The exit code is 0 exactly when a submission lies at its place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Protocol

from core.domain.errors import GodMinerError
from core.domain.evaluation import Era
from core.runs.progress import (
    EndEvent,
    NoteEvent,
    OomEvent,
    ProgressEvent,
    StageEvent,
    StepEvent,
    SubmissionEvent,
    parse_events,
)
from core.runs.run_files import RunResult, RunSpec, TrainerExitCode
from core.submission.swap import recover_swap
from core.system.wrapper import adopt_orphans
from trainer.handoff import TrainingOutcome, write_record
from trainer.runner.command_line import UsageError
from trainer.runner.machines import Follower, Machine
from trainer.runner.processes import StopRequest, kill_descendants
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
    with contextlib.suppress(OSError):
        # Nobody comes after a training that was ended, or ended itself, within an exchange.
        recover_swap(submission.place)
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
    """Return True if competitors can read the output: in a tournament, not with a daemon."""
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


LOG_FILE = "console.log"
#: What every training has; that a learning rate is searched or files are compared is a part of the plan.
STAGES = frozenset({"data", "load", "evaluate", "train"})
#: How often new events are looked for.
_LOOK_S = 1.0
#: What a validator keeps of a failed container's log is the last line with a colon and one of these words.
_ERROR = re.compile(r"Error|Exception")
_LONGEST = 300


class PublicLog:
    """One short line per event, while the process's own output goes to a file.

    All that a tournament's container prints is public while the tournament runs, and must not show
    competitors the plan. Engines print their whole configuration, and the learning rate with every step; this
    goes to a file in the work directory, with our own log."""

    def __init__(self, progress: Path, public: int) -> None:
        self._progress, self._public = progress, public
        self._offset = 0
        self._stages: set[str] = set()
        self._submissions = 0
        self._ended = threading.Event()
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._follower.start()

    def end(self, result: RunResult) -> None:
        """Print what is left of the events, and how it ended."""
        self.stop()
        if result.submission:
            self._say("ended: a submission is in its place")
        if result.exit_code != 0:
            self._say(f"Error: {result.end}: {error_line(result.detail)}")

    def stop(self) -> None:
        self._ended.set()
        self._follower.join()

    def _follow(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self._print_new()
        self._print_new()

    def _print_new(self) -> None:
        try:
            with self._progress.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        for line in parse_events(data, self._offset):
            self._offset = line.offset
            text = self._text(line.event) if line.event is not None else None
            if text is not None:
                self._say(text)

    def _text(self, event: ProgressEvent) -> str | None:
        if isinstance(event, StageEvent) and event.stage in STAGES - self._stages:
            self._stages.add(event.stage)
            return f"stage: {event.stage}"
        if isinstance(event, SubmissionEvent):
            self._submissions += 1
            which = "a" if self._submissions == 1 else "a better"
            return f"{which} submission is in its place"
        if isinstance(event, OomEvent):
            return "memory ran out"
        if isinstance(event, NoteEvent) and event.kind == "remedy":
            return "another launch follows"
        return None

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._public, f"trainer: {text}\n".encode())


def error_line(detail: str) -> str:
    """Pick the most telling line of a failure's text."""
    lines = [line.strip() for line in detail.splitlines() if line.strip()]
    said = [line for line in lines if _ERROR.search(line)]
    return (said[-1] if said else lines[0] if lines else "no details")[:_LONGEST]


@contextlib.contextmanager
def public_log(work: Path, progress: Path) -> Iterator[PublicLog]:
    """Send the output of this process and its children to a file in `work`, and events to where it went."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = [os.dup(1), os.dup(2)]
    try:
        # A full disk costs the log and not the training.
        file = os.open(work / LOG_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        file = os.open(os.devnull, os.O_WRONLY)
    log = PublicLog(progress, kept[1])
    try:
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        yield log
    finally:
        log.stop()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for descriptor, saved in zip((1, 2), kept, strict=True):
            os.dup2(saved, descriptor)
        for descriptor in (*kept, file):
            os.close(descriptor)
