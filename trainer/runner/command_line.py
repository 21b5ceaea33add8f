"""The command lines: exactly the validator's, and `--run` for the daemon.

A validator's next version may add options. An unknown one is ignored with a warning: a training without it is
worth more than none.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from core.domain.errors import GodMinerError
from core.domain.evaluation import Era
from core.domain.tasks import DatasetType, FileFormat, ImageModelType, TaskType
from core.runs.run_files import PROGRESS_FILE, RESULT_FILE, STOP_FILE, RunSpec, tournament_reserve_s

log = logging.getLogger(__name__)

#: Where validators mount what was downloaded, and what is uploaded afterwards.
CACHE = Path("/cache")
CHECKPOINTS = Path("/app/checkpoints")
#: Validators truncate the hours to a whole number before passing them on, and end the container by the exact
#: number: zero means less than an hour, and the least that they give is three quarters.
ZERO_HOURS = 0.7
#: A writable folder for scratch files, in place of the default.
WORK_VARIABLE = "GOD_MINER_WORK"
#: Where validators put what they have measured of the base model.
STATS_VARIABLE = "BASELINE_STATS_PATH"
#: The container's own disk is taken when it has this part of what the larger one has.
ENOUGH_FREE = 0.5
_DATASET: TypeAdapter[DatasetType] = TypeAdapter(DatasetType)


class UsageError(GodMinerError):
    """A command line that names no valid task."""

    code = "usage"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def text_run(arguments: Sequence[str]) -> RunSpec:
    """Return the run of a text task; raise `UsageError` if the command line has none."""
    if (run := _run_file(arguments)) is not None:
        return run
    parser = _common("trainer.text")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--dataset-type", required=True)
    parser.add_argument("--task-type", required=True)
    parser.add_argument("--file-format", default=FileFormat.S3.value)
    options = _parsed(parser, arguments)
    task_type = _one_of(TaskType, options.task_type, "--task-type")
    if not task_type.is_text:
        raise UsageError(f"--task-type {options.task_type}: trainer.image is the trainer of images")
    return _tournament(
        options,
        task_type=task_type,
        model_path=CACHE / "models" / options.model.replace("/", "--"),
        data_path=_text_data(options.task_id, options.dataset, options.file_format),
        dataset=_dataset(options.dataset_type),
        kl_coefficient=_kl(os.environ),
        requested_data=_requested(os.environ),
        baseline_stats_path=_stats_path(os.environ),
    )


def image_run(arguments: Sequence[str]) -> RunSpec:
    """Return the run of an image task; raise `UsageError` if the command line has none."""
    if (run := _run_file(arguments)) is not None:
        return run
    parser = _common("trainer.image")
    parser.add_argument("--dataset-zip", default="")
    parser.add_argument("--model-type", default=ImageModelType.SDXL.value)
    parser.add_argument("--trigger-word", nargs="?")
    options = _parsed(parser, arguments)
    return _tournament(
        options,
        task_type=TaskType.IMAGE,
        model_path=CACHE / "models" / options.model.replace("/", "--"),
        data_path=CACHE / "datasets" / f"{options.task_id}_tourn.zip",
        image_type=_one_of(ImageModelType, options.model_type, "--model-type"),
        trigger_word=options.trigger_word or None,
    )


def _run_file(arguments: Sequence[str]) -> RunSpec | None:
    if "--run" not in arguments:
        return None
    parser = _Parser(prog="trainer", allow_abbrev=False)
    parser.add_argument("--run", required=True)
    path = Path(_parsed(parser, arguments).run)
    try:
        return RunSpec.from_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UsageError(f"--run {path}: {error}") from error


def _common(name: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=name, allow_abbrev=False)
    parser.add_argument("--task-id", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--expected-repo-name", required=True)
    parser.add_argument("--hours-to-complete", required=True)
    return parser


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    options, unknown = parser.parse_known_args(list(arguments))
    if unknown:
        log.warning("unknown arguments are ignored: %s", " ".join(unknown)[:500])
    return options


EnumKind = TypeVar("EnumKind", TaskType, ImageModelType)


def _one_of(kind: type[EnumKind], value: str, option: str) -> EnumKind:
    try:
        return kind(value)
    except ValueError as error:
        known = ", ".join(member.value for member in kind)
        raise UsageError(f"{option} {value!r} is unknown; one of {known}") from error


def _dataset(text: str) -> DatasetType:
    try:
        return _DATASET.validate_python(json.loads(text))
    except ValueError as error:
        raise UsageError(f"--dataset-type {text[:200]!r}: {error}") from error


def _text_data(task_id: str, dataset: str, file_format: str) -> Path:
    """One JSON file, or the folder of a dataset from the hub."""
    if file_format == FileFormat.HF.value:
        return CACHE / "datasets" / dataset.replace("/", "--")
    return CACHE / "datasets" / f"{task_id}_train_data.json"


def parse_hours(text: str) -> float:
    """Hours to train for; anything invalid is taken for the least that validators give."""
    try:
        hours = float(text)
    except ValueError:
        hours = math.nan
    if math.isfinite(hours) and hours > 0:
        return hours
    log.warning("--hours-to-complete %s: taken for %s hours", text, ZERO_HOURS)
    return ZERO_HOURS


def _kl(environment: Mapping[str, str]) -> float | None:
    """The KL coefficient: tournament tasks that score KL as well set it in the environment."""
    if environment.get("USE_KL", "").strip().lower() not in ("1", "true", "yes"):
        return None
    try:
        coefficient = float(environment.get("KL_COEF", ""))
    except ValueError:
        log.warning("USE_KL is set and KL_COEF is %r: no such term", environment.get("KL_COEF"))
        return None
    return coefficient if math.isfinite(coefficient) and coefficient > 0 else None


def _requested(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The folders of the datasets that arrived, of those that the entry asked for."""
    folder = Path(environment.get("MINER_DATASETS_DIR") or CACHE / "miner_datasets")
    names = [name.strip() for name in environment.get("MINER_DATASETS", "").split(",")]
    # What is not ASCII may be a byte of no encoding, which no JSON can carry.
    return tuple(str(folder / name) for name in names if _plain(name) and str(folder / name).isascii())


def _stats_path(environment: Mapping[str, str]) -> str | None:
    path = environment.get(STATS_VARIABLE, "")
    if path.isascii():
        return path or None
    log.warning("%s is ignored: %r", STATS_VARIABLE, path[:200])
    return None


def _tournament(options: argparse.Namespace, **task: object) -> RunSpec:
    """Paths as validators mount them; the clock runs from the container's start."""
    began = process_start()
    seconds = parse_hours(options.hours_to_complete) * 3600
    submission = CHECKPOINTS / options.task_id / options.expected_repo_name
    if not _plain(options.task_id) or not _plain(options.expected_repo_name):
        raise UsageError(f"--task-id and --expected-repo-name are single names: {str(submission)!r}")
    work = work_folder(submission.parent, options.task_id)
    return RunSpec.model_validate(
        {
            "task_id": options.task_id,
            "model_id": options.model,
            "expected_repo_name": options.expected_repo_name,
            "era": Era.TOURNAMENTS,
            "work_dir": str(work),
            "submission_dir": str(submission),
            "progress_path": str(work / PROGRESS_FILE),
            "result_path": str(work / RESULT_FILE),
            "stop_path": str(work / STOP_FILE),
            "began_at": began,
            "end_by": began + seconds - tournament_reserve_s(seconds, "image_type" in task),
            "deadline_at": began + seconds,
            **{key: str(value) if isinstance(value, Path) else value for key, value in task.items()},
        }
    )


def _plain(name: str) -> bool:
    return bool(name) and "/" not in name and "\0" not in name and name not in (".", "..")


def work_folder(submissions: Path, task_id: str) -> Path:
    """The folder for scratch files: on the disk with more room, preferring the container's own, which goes
    away with it. Never in the folder that is uploaded."""
    named = os.environ.get(WORK_VARIABLE)
    if named:
        return Path(named) / task_id
    candidates = [_temporary(), submissions.parent]
    free = {folder: _free(folder) for folder in candidates}
    best = max(candidates, key=lambda folder: free[folder])
    first = candidates[0]
    chosen = first if free[first] >= ENOUGH_FREE * free[best] else best
    return chosen / f".god-miner-{task_id}"


def _temporary() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except OSError:  # a read-only container without a folder for it
        return Path("/tmp")  # noqa: S108 - what follows finds that it cannot be written


def _free(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            return -1
        return shutil.disk_usage(folder).free
    except OSError:
        return -1


def process_start() -> float:
    """When this process began, in seconds since the epoch: imports have cost seconds already."""
    try:
        ticks = Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()[19]
        up = time.clock_gettime(time.CLOCK_BOOTTIME)
        age = up - int(ticks) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - max(age, 0.0)
