"""The files through which daemon and trainer meet in one attempt.

The daemon writes `run.json` and the plan; the trainer writes progress, a result and the submission. A
tournament has no daemon: there the trainer builds its run from the validator's command line.

`EvalTask` is the file that `god-miner eval` scores models on.
"""

from __future__ import annotations

import json
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError

from core.domain.errors import ConfigError, Problem
from core.domain.evaluation import Era, RewardScore
from core.domain.records import Record, SanitizedText
from core.domain.tasks import TASK_TYPE_OF, DatasetType, FileFormat, ImageModelType, TaskType
from core.system.files import write_atomically

RUN_FILE = "run.json"
PLAN_FILE = "plan.json"
PROGRESS_FILE = "progress.jsonl"
RESULT_FILE = "result.json"
LOG_FILE = "log"
#: Written by the daemon: the trainer saves its best model and ends, as after SIGTERM.
STOP_FILE = "stop"

RUN_VERSION: Literal[1] = 1
#: Fields of a task file that only a training needs.
_TRAINING_FIELDS = {
    "model",
    "model_folder",
    "hours_to_complete",
    "task_id",
    "expected_repo_name",
    "file_format",
    "profile",
    "tags",
    "note",
}
CONTROL_FILE = "control.json"
#: A file that is longer is not ours.
MAX_CONTROL_BYTES = 4096


class RunSpec(Record):
    """One attempt, as the trainer sees it. Paths are the trainer's; nothing in it is secret."""

    version: Literal[1] = RUN_VERSION
    task_id: str
    task_type: TaskType
    #: The hub's name, which goes into `adapter_config.json`; and its directory (images: or file).
    model_id: str
    model_path: str
    #: Text: one JSON array of rows (plain text: see `trainer.inputs.corpus`). Images: the zip.
    data_path: str
    #: Folders of datasets that a tournament's entry requested and got; environment tasks use them.
    requested_data: tuple[str, ...] = ()
    #: None with a text task: plain text, all tokens of which are learned (the native trainer's pretraining).
    dataset: DatasetType | None = None
    image_type: ImageModelType | None = None
    trigger_word: str | None = None
    expected_repo_name: str | None = None
    #: Whose evaluation the rows and scores follow: offers', or tournaments' (from their command line).
    era: Era = Era.OFFERS
    #: Tournament tasks with a KL term: its weight per nat. None: no such term.
    kl_coefficient: float | None = None
    #: None: the trainer plans for itself, from its GPUs and the time left.
    plan_path: str | None = None
    #: The attempt's own files: adapted rows, engine configuration, checkpoints, caches.
    work_dir: str
    #: A complete submission is renamed to this. Its parent is writable and on the same file system.
    submission_dir: str
    progress_path: str
    result_path: str
    stop_path: str
    #: What the daemon asks while the training runs (`core.runs.run_files`). None: nobody asks.
    control_path: str | None = None
    #: Seconds since the epoch: the last save is over by `end_by`; the validator's own end is `deadline_at`.
    began_at: float
    end_by: float
    deadline_at: float
    #: What a tournament's validator has measured of the base model (`core.planning.baseline_stats`).
    baseline_stats_path: str | None = None
    #: A checkpoint of an earlier attempt.
    resume_from: str | None = None
    seed: int = 42

    def to_json(self) -> str:
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return cls.model_validate_json(text)


def tournament_reserve_s(seconds: float, pictures: bool) -> float:
    """From `end_by` to the end of a tournament's task. An adapter of pictures is small, and complete at every
    instant: what is left to do then takes two seconds, and a training that hangs is ended within the half."""
    return min(30.0 if pictures else 180.0, 0.1 * seconds)


class RunEnd(StrEnum):
    """Why a training ended, as the trainer reports it."""

    FINISHED = "finished"
    EARLY = "early"  # no better score for too long
    CLOCK = "clock"  # the time was over; the best model is saved
    STOPPED = "stopped"  # on request, by signal or file
    OOM = "oom"
    NAN = "nan"
    BAD_DATA = "bad_data"
    BAD_MODEL = "bad_model"
    BAD_REWARD = "bad_reward"
    DISK_FULL = "disk_full"
    HUNG = "hung"
    KILLED = "killed"  # by a signal from outside, not for memory
    INFEASIBLE = "infeasible"  # by the plan, or no time left to begin
    CRASHED = "crashed"


class TrainerExitCode(IntEnum):
    """Zero exactly when a valid submission is in its place: after any other, validators upload nothing."""

    OK = 0
    CRASHED = 1
    USAGE = 2
    BAD_DATA = 20
    BAD_MODEL = 21
    BAD_REWARD = 22
    INFEASIBLE = 23
    OOM = 30
    NAN = 31
    DISK_FULL = 32
    HUNG = 33
    STOPPED = 34
    KILLED = 35


EXIT_OF: dict[RunEnd, TrainerExitCode] = {
    RunEnd.OOM: TrainerExitCode.OOM,
    RunEnd.NAN: TrainerExitCode.NAN,
    RunEnd.BAD_DATA: TrainerExitCode.BAD_DATA,
    RunEnd.BAD_MODEL: TrainerExitCode.BAD_MODEL,
    RunEnd.BAD_REWARD: TrainerExitCode.BAD_REWARD,
    RunEnd.DISK_FULL: TrainerExitCode.DISK_FULL,
    RunEnd.HUNG: TrainerExitCode.HUNG,
    RunEnd.INFEASIBLE: TrainerExitCode.INFEASIBLE,
    RunEnd.STOPPED: TrainerExitCode.STOPPED,
    RunEnd.KILLED: TrainerExitCode.KILLED,
}


class HeldOutScore(Record):
    """A held-out score by the validator's metric."""

    value: float
    metric: str = "eval_loss"
    lower_is_better: bool = True
    step: int = Field(ge=0)
    #: Of tasks with rewards: this pair decides which is better; `value` is the margin over the base.
    rewarded: RewardScore | None = None

    def beats(self, other: HeldOutScore | None) -> bool:
        if other is None:
            return True
        if self.rewarded is not None and other.rewarded is not None:
            return self.rewarded.beats(other.rewarded)
        return self.value < other.value if self.lower_is_better else self.value > other.value


class RunResult(Record):
    """The end of the training; written atomically, at the very end."""

    end: RunEnd
    #: Whether a complete submission is in its place, whatever else happened.
    submission: bool
    detail: SanitizedText = ""
    best: HeldOutScore | None = None
    base: HeldOutScore | None = None
    steps: int = Field(default=0, ge=0)
    seconds: float = Field(default=0.0, ge=0)
    #: Over the optimizer steps: the median speed, and the peak memory of the GPU that uses the most.
    tokens_s: float | None = None
    memory_bytes: int | None = None
    #: With `oom`: "train", "evaluation" or "generation".
    moment: str | None = None

    @property
    def exit_code(self) -> TrainerExitCode:
        return TrainerExitCode.OK if self.submission else EXIT_OF.get(self.end, TrainerExitCode.CRASHED)


class EvalTask(Record):
    """Rows, and how a model is evaluated on them."""

    dataset_type: DatasetType
    #: A file of rows, or a directory of such.
    data: str = Field(min_length=1)
    era: Era = Era.OFFERS
    kl_coefficient: float | None = Field(default=None, ge=0)

    @property
    def task_type(self) -> TaskType | None:
        """Return None for tasks that are not scored on rows."""
        return TASK_TYPE_OF.get(self.dataset_type.kind)

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read the file, with an absolute path of the data; `ConfigError` with all that is wrong."""
        fields = _read_json(file)
        try:
            if "work_dir" in fields:
                return cls._of_run(RunSpec.model_validate(fields), file)
            task = cls.model_validate(_rows_fields(fields, file))
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=False, include_input=False)
            problems = [
                Problem(".".join(map(str, detail["loc"])) or file.name, "", detail["msg"])
                for detail in details
            ]
            raise ConfigError(str(file), problems) from None
        return task.model_copy(update={"data": str((file.parent / task.data).resolve())})

    @classmethod
    def _of_run(cls, spec: RunSpec, file: Path) -> Self:
        if spec.dataset is None:
            rule = "image tasks are scored where their model's engine is installed, see docs/evaluation.md"
            raise ConfigError(str(file), [Problem("task_type", str(spec.task_type), rule)])
        coefficient = spec.kl_coefficient
        return cls(dataset_type=spec.dataset, data=spec.data_path, era=spec.era, kl_coefficient=coefficient)


def _rows_fields(task: dict[str, Any], file: Path) -> dict[str, Any]:
    fields = {key: value for key, value in task.items() if key not in _TRAINING_FIELDS}
    if "dataset" in fields and "data" not in fields:
        fields["data"] = fields.pop("dataset")
        if task.get("file_format") == FileFormat.HF or str(fields["data"]).startswith(
            ("http://", "https://")
        ):
            rule = "is not on this machine; `eval` scores on a file of rows"
            raise ConfigError(str(file), [Problem("dataset", str(fields["data"]), rule)])
    return fields


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(str(file), [Problem(file.name, "", f"cannot be read as JSON: {error}")]) from None
    if not isinstance(content, dict):
        raise ConfigError(str(file), [Problem(file.name, type(content).__name__, "a JSON object is needed")])
    return content


class RunControl(Record):
    version: Literal[1] = 1
    #: Grows with every request; the trainer reports it back.
    number: int = Field(ge=1)
    #: Sequences of one pass on one GPU, or None to stay as it began.
    micro: int | None = Field(default=None, ge=1)
    #: Share of the time in which the GPU computes; the rest is paused between steps.
    duty: float = Field(default=1.0, ge=0.5, le=1.0)


def even_micro(sequences: int, most: int) -> int:
    """The largest micro-batch where a step's sequences on one GPU (micro × accumulation) are shared out
    evenly over as few passes as `most` sequences each allow: 16 in passes of up to 7 are 6, 5 and 5."""
    passes = -(-sequences // most)
    return -(-sequences // passes)


def write_control(path: Path, control: RunControl) -> None:
    write_atomically(path, control.model_dump_json().encode(), mode=0o644)


def read_control(path: Path) -> RunControl | None:
    """Return the request, or None if there is no readable one: a training goes on as it is."""
    try:
        with path.open("rb") as file:
            return RunControl.model_validate_json(file.read(MAX_CONTROL_BYTES + 1))
    except (OSError, ValueError):
        return None
