"""The files through which the runner and the training processes talk.

They share no memory: the path of the launch spec is in the environment, and every answer is a file beside it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar, Self, TypeVar

from pydantic import Field

from core.domain.records import Record, SanitizedText
from core.planning.plan import TrainingPlan
from core.runs.run_files import HeldOutScore, RunEnd, RunSpec
from core.system.files import write_atomically

LAUNCH_SPEC_VARIABLE = "GOD_MINER_LAUNCH_SPEC"


class PreparedRows(Record):
    """The rows of a text task as they lie on disk for one attempt."""

    train_path: Path
    #: None: too few rows to hold any out.
    eval_path: Path | None = None
    train_rows: int
    eval_rows: int
    #: Why rows are missing, and how many for each reason.
    dropped: dict[str, int] = Field(default_factory=dict)
    #: What the operator should know of them.
    notes: tuple[str, ...] = ()
    #: Of the rows and of how they were cut: new data is a new path, so no cache can mix them up.
    digest: str = ""
    #: GRPO: holds the module `task_rewards`; belongs on PYTHONPATH.
    rewards_dir: Path | None = None
    #: The token to pad with, where the tokenizer has none.
    pad_token: str | None = None
    #: DPO: the held-out rows as the other era's evaluation encodes them, where that is different.
    other_path: Path | None = None


class PrepareSpec(Record):
    """Order for the preparing child, with the paths of its results."""

    run: RunSpec
    #: None: the child makes one.
    plan_path: str | None
    #: The plan that is followed, whether received or made.
    plan_out: str
    #: Where rows are written.
    folder: str
    #: A `PreparedRows`, or a `TrainingFailure` at `failure_out`.
    prepared_out: str
    failure_out: str

    @property
    def trial_path(self) -> Path:
        """A file that exists while the tokenizer is loaded and encodes the first rows, which may never
        end."""
        return Path(self.folder) / "trial"


class LaunchSpec(Record):
    """One launch of an engine."""

    run: RunSpec
    plan_path: str
    #: Of this launch alone: marker, outcome and failures lie here.
    launch_dir: str
    prepared: PreparedRows
    #: The runner. The trainer ends with it: without one it would hold the GPUs for ever.
    wrapper_pid: int | None = None
    #: A checkpoint folder, complete, of this run or an earlier one.
    resume_from: str | None = None

    @classmethod
    def read(cls) -> Self:
        """The spec of this process's launch; `KeyError` outside of one."""
        return cls.model_validate_json(Path(os.environ[LAUNCH_SPEC_VARIABLE]).read_bytes())

    @property
    def plan(self) -> TrainingPlan:
        return TrainingPlan.from_json(Path(self.plan_path).read_bytes())

    def write(self, name: str = "launch.json") -> Path:
        path = Path(self.launch_dir) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=2), encoding="utf-8")
        return path

    @property
    def marker_path(self) -> Path:
        """Written by our plugin as soon as the engine has loaded it: engines go on without a plugin."""
        return Path(self.launch_dir) / "plugin"

    @property
    def started_path(self) -> Path:
        """Written before the first step: from then on it is worth waiting for a graceful stop."""
        return Path(self.launch_dir) / "begun"

    @property
    def outcome_path(self) -> Path:
        return Path(self.launch_dir) / "outcome.json"

    def failure_path(self, rank: int) -> Path:
        return Path(self.launch_dir) / f"failure-{rank}.json"

    def machine_end_path(self, machine: int) -> Path:
        return Path(self.launch_dir) / f"machine-{machine}.json"


class MachinesLaunch(Record):
    """A launch on several machines: what the first asks of the others, in the launch's directory."""

    FILE: ClassVar[str] = "machines.json"

    spec: LaunchSpec
    #: By the machine's rank.
    commands: tuple[tuple[str, ...], ...]
    env: dict[str, str]


class MachineEnd(Record):
    """End of the ranks on a machine other than the first."""

    end: RunEnd
    detail: SanitizedText = ""
    moment: str | None = None


class TrainingOutcome(Record):
    """End of a training that was not stopped from outside."""

    end: RunEnd
    detail: SanitizedText = ""
    steps: int = 0
    best: HeldOutScore | None = None
    base: HeldOutScore | None = None


class TrainingFailure(Record):
    """Cause of a training process's unexpected end."""

    end: RunEnd
    #: Out of memory: the phase, "train", "evaluation" or "generation".
    moment: str | None = None
    detail: SanitizedText = ""
    traceback: SanitizedText = ""
    at: float = 0.0
    #: Only the consequence of another process's failure.
    consequence: bool = False


def write_record(path: Path, record: Record) -> None:
    write_atomically(path, record.model_dump_json(indent=2).encode(), mode=0o644)


RecordType = TypeVar("RecordType", bound=Record)


def read_record(kind: type[RecordType], path: Path) -> RecordType | None:
    """Read a record; return None if there is no such file, or an incomplete one."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None
