"""From a command line to an exit code, with a result file whatever happens in between."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from core.errors import GodMinerError
from core.evaluation import Era
from core.run_files import ExitCode, RunResult, RunSpec
from trainer.callbacks.failures import end_of
from trainer.command_line import UsageError
from trainer.wrapper.processes import adopt_orphans, kill_descendants
from trainer.wrapper.result import conclude
from trainer.wrapper.signals import StopRequest

log = logging.getLogger(__name__)


class Course(Protocol):
    def follow(self) -> RunResult: ...


def run_to_the_end(
    parse: Callable[[Sequence[str]], RunSpec],
    course: Callable[[RunSpec, StopRequest], Course],
    arguments: Sequence[str],
) -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        run = parse(arguments)
    except UsageError as error:
        log.error("%s", error)
        return int(ExitCode.USAGE)
    stop = StopRequest(Path(run.stop_path))
    stop.listen()
    adopt_orphans()
    try:
        _make_folders(run)
        result = course(run, stop).follow()
    except Exception as error:  # noqa: BLE001 - whatever it is: the result file says so, with the traceback
        result = _failed(run, error)
    finally:
        kill_descendants()
    log.info("%s: %s", result.end, result.detail or "no details")
    return int(result.exit_code)


def nobody_else_retries(run: RunSpec) -> bool:
    """A daemon makes its own new attempts; a tournament counts a failure."""
    return run.plan_path is None or run.era is Era.TOURNAMENTS


def _make_folders(run: RunSpec) -> None:
    # Files are for whoever uploads them, not only for the user that the container happens to run as.
    os.umask(0o022)
    if run.era is Era.TOURNAMENTS and run.plan_path is None:
        # A validator's second attempt finds the first one's volume: its outcome and its request to stop are
        # not this one's. The submission beside it stays; so does a folder that is none of ours.
        left = (run.progress_path, run.result_path, run.stop_path)
        if any(Path(path).parent == Path(run.work_dir) and Path(path).exists() for path in left):
            shutil.rmtree(run.work_dir, ignore_errors=True)
    Path(run.work_dir).mkdir(parents=True, exist_ok=True)
    for path in (run.progress_path, run.result_path, run.submission_dir, run.stop_path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)


def _failed(run: RunSpec, error: Exception) -> RunResult:
    log.error("the run ends with an error", exc_info=error)
    words = str(error) if isinstance(error, GodMinerError) else "".join(traceback.format_exception(error))
    return conclude(run, end_of(error), words)
