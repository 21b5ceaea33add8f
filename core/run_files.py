"""What the daemon and the trainer hand each other: files of one attempt, and nothing else.

The daemon writes `run.json` and the plan; the trainer writes progress, a result and the submission. A
tournament has no daemon: there the trainer makes its own run from the validator's command line.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Literal, Self

from pydantic import Field

from core.evaluation import Era
from core.facts import Record, Said
from core.rewarded import Rewarded
from core.tasks import DatasetType, ImageModelType, TaskType

RUN_FILE = "run.json"
PLAN_FILE = "plan.json"
PROGRESS_FILE = "progress.jsonl"
RESULT_FILE = "result.json"
LOG_FILE = "log"
#: Put here by the daemon: the trainer saves the best it has and ends, as with SIGTERM.
STOP_FILE = "stop"

RUN_VERSION: Literal[1] = 1


class RunSpec(Record):
    """One attempt, as the trainer sees it. Paths are the trainer's own; nothing in here is secret."""

    version: Literal[1] = RUN_VERSION
    task_id: str
    task_type: TaskType
    #: The hub's name, which goes into `adapter_config.json`; and the folder (images: or file) it lies in.
    model_id: str
    model_path: str
    #: Text: one JSON array of rows; plain text: see `trainer.native.corpus`. Images: the zip.
    data_path: str
    #: None with a text task: plain text, every token of which is learned (the native trainer's pretraining).
    dataset: DatasetType | None = None
    image_type: ImageModelType | None = None
    trigger_word: str | None = None
    expected_repo_name: str | None = None
    #: Whose evaluation data and scores are made for: offers', or tournaments' (by their command line).
    era: Era = Era.OFFERS
    #: Tournament tasks with a KL term: what a nat costs. None: no such term.
    kl_coefficient: float | None = None
    #: None: the trainer plans for itself from the GPUs it sees and the time left.
    plan_path: str | None = None
    #: Scratch of this attempt: adapted rows, engine configuration, checkpoints, caches.
    work_dir: str
    #: Where a complete submission is renamed in. Its parent is writable and on the same file system.
    submission_dir: str
    progress_path: str
    result_path: str
    stop_path: str
    #: Seconds since the epoch: the last save is over by `end_by`; the validator's own end is `deadline_at`.
    began_at: float
    end_by: float
    deadline_at: float
    #: A checkpoint folder of an earlier attempt.
    resume_from: str | None = None
    seed: int = 42

    def to_json(self) -> str:
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return cls.model_validate_json(text)


class RunEnd(StrEnum):
    """Why a training ended, in the trainer's own words."""

    FINISHED = "finished"
    EARLY = "early"  # no better score for too long
    CLOCK = "clock"  # the time was over; what was best is saved
    STOPPED = "stopped"  # asked to, by signal or file
    OOM = "oom"
    NAN = "nan"
    BAD_DATA = "bad_data"
    BAD_MODEL = "bad_model"
    BAD_REWARD = "bad_reward"
    DISK_FULL = "disk_full"
    HUNG = "hung"
    KILLED = "killed"  # by a signal from outside, and not for memory
    INFEASIBLE = "infeasible"  # the plan, or no time left to begin
    CRASHED = "crashed"


class ExitCode(IntEnum):
    """Zero exactly when a valid submission lies at its place: validators upload nothing after any other."""

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


EXIT_OF: dict[RunEnd, ExitCode] = {
    RunEnd.OOM: ExitCode.OOM,
    RunEnd.NAN: ExitCode.NAN,
    RunEnd.BAD_DATA: ExitCode.BAD_DATA,
    RunEnd.BAD_MODEL: ExitCode.BAD_MODEL,
    RunEnd.BAD_REWARD: ExitCode.BAD_REWARD,
    RunEnd.DISK_FULL: ExitCode.DISK_FULL,
    RunEnd.HUNG: ExitCode.HUNG,
    RunEnd.INFEASIBLE: ExitCode.INFEASIBLE,
    RunEnd.STOPPED: ExitCode.STOPPED,
    RunEnd.KILLED: ExitCode.KILLED,
}


class Score(Record):
    """A held-out score by the validator's metric."""

    value: float
    metric: str = "eval_loss"
    lower_is_better: bool = True
    step: int = Field(ge=0)
    #: Of tasks with rewards: the pair is asked which one is better; `value` is the margin over the base.
    rewarded: Rewarded | None = None

    def beats(self, other: Score | None) -> bool:
        if other is None:
            return True
        if self.rewarded is not None and other.rewarded is not None:
            return self.rewarded.beats(other.rewarded)
        return self.value < other.value if self.lower_is_better else self.value > other.value


class RunResult(Record):
    """The trainer's last word, written whole and renamed in."""

    end: RunEnd
    #: Whether a complete submission lies at its place, whatever else happened.
    submission: bool
    detail: Said = ""
    best: Score | None = None
    base: Score | None = None
    steps: int = Field(default=0, ge=0)
    seconds: float = Field(default=0.0, ge=0)
    #: Of the optimizer steps: the median speed, and the peak of the fullest GPU.
    tokens_s: float | None = None
    memory_bytes: int | None = None
    #: Of an end without memory: "train", "evaluation" or "generation".
    moment: str | None = None

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.OK if self.submission else EXIT_OF.get(self.end, ExitCode.CRASHED)
