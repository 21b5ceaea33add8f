"""What the wrapper tells the training processes, and what they leave behind for it.

The wrapper and the engine never share memory: the sheet is a file whose path is in the environment, and every
answer is a file beside it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self, TypeVar

from pydantic import Field

from core.facts import Record, Said
from core.files import write_atomically
from core.run_files import RunEnd, RunSpec, Score

SHEET_VARIABLE = "GOD_MINER_SHEET"


class Prepared(Record):
    """The rows of a text task as they lie on disk; `trainer.inputs.text.PreparedText` in a file."""

    train_path: str
    eval_path: str | None = None
    train_rows: int
    eval_rows: int
    #: Why rows are missing, and how many for each reason.
    dropped: dict[str, int] = Field(default_factory=dict)
    digest: str = ""
    rewards_dir: str | None = None
    #: The token to pad with, where the tokenizer has none.
    pad_token: str | None = None
    other_path: str | None = None


class Ask(Record):
    """What the preparing child is to do, and where its answers go."""

    run: RunSpec
    #: None: it makes one.
    plan_path: str | None
    #: The plan that was followed, given or made.
    plan_out: str
    #: Where rows are written.
    folder: str
    #: A `Prepared`, or a `Failure` at `failure_out`.
    prepared_out: str
    failure_out: str


class Sheet(Record):
    """One launch of an engine."""

    run: RunSpec
    plan_path: str
    #: Of this launch alone: marker, outcome and failures lie here.
    launch_dir: str
    prepared: Prepared
    #: Ends with this process: a trainer without its wrapper would hold the GPUs for ever.
    wrapper_pid: int | None = None
    #: A checkpoint folder, complete, of this run or an earlier one.
    resume_from: str | None = None

    @classmethod
    def read(cls) -> Self:
        """The sheet of this process's launch; `KeyError` outside of one."""
        return cls.model_validate_json(Path(os.environ[SHEET_VARIABLE]).read_bytes())

    def write(self) -> Path:
        path = Path(self.launch_dir) / "sheet.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=2), encoding="utf-8")
        return path

    @property
    def marker_path(self) -> Path:
        """Written by our plugin as soon as the engine has loaded it: engines go on without one."""
        return Path(self.launch_dir) / "plugin"

    @property
    def begun_path(self) -> Path:
        """Written before the first step: from then on a stop is worth waiting for."""
        return Path(self.launch_dir) / "begun"

    @property
    def outcome_path(self) -> Path:
        return Path(self.launch_dir) / "outcome.json"

    def failure_path(self, rank: int) -> Path:
        return Path(self.launch_dir) / f"failure-{rank}.json"


class Outcome(Record):
    """How the training ended, when it ended by itself."""

    end: RunEnd
    detail: Said = ""
    steps: int = 0
    best: Score | None = None
    base: Score | None = None


class Failure(Record):
    """What ended a training process that did not mean to end."""

    end: RunEnd
    #: Of an end without memory: "train", "evaluation" or "generation".
    moment: str | None = None
    detail: Said = ""
    traceback: Said = ""
    at: float = 0.0
    #: Of another process's end, which says more.
    consequence: bool = False


def write_whole(path: Path, record: Record) -> None:
    write_atomically(path, record.model_dump_json(indent=2).encode(), mode=0o644)


Read = TypeVar("Read", bound=Record)


def read_record(kind: type[Read], path: Path) -> Read | None:
    """None where there is none, or not a whole one."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None
