"""What the wrapper tells the training processes, and what they leave behind for it.

The wrapper and the engine never share memory: the sheet is a file whose path is in the environment, and every
answer is a file beside it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from core.facts import Record
from core.run_files import RunEnd, RunSpec, Score

SHEET_VARIABLE = "GOD_MINER_SHEET"


class Sheet(Record):
    """One launch of an engine."""

    run: RunSpec
    plan_path: str
    #: Of this launch alone: marker, outcome and failures lie here.
    launch_dir: str
    #: Held-out rows as the validator's metric reads them; None when there are none to spare.
    eval_path: str | None = None
    #: Ends with this process: a trainer without its wrapper would hold the GPUs for ever.
    wrapper_pid: int | None = None
    #: KL to the base model, as the tournament asks for it.
    kl_coefficient: float | None = None

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
    def outcome_path(self) -> Path:
        return Path(self.launch_dir) / "outcome.json"

    def failure_path(self, rank: int) -> Path:
        return Path(self.launch_dir) / f"failure-{rank}.json"


class Outcome(Record):
    """How the training ended, when it ended by itself."""

    end: RunEnd
    detail: str = ""
    steps: int = 0
    best: Score | None = None
    base: Score | None = None


class Failure(Record):
    """What ended a training process that did not mean to end."""

    end: RunEnd
    #: Of an end without memory: "train", "evaluation" or "generation".
    moment: str | None = None
    detail: str = ""
    traceback: str = ""
    at: float = 0.0


def write_whole(path: Path, record: Record) -> None:
    """Beside, then renamed in: whoever reads sees all of it or nothing."""
    half = path.with_name(f".{path.name}.half")
    half.write_text(record.model_dump_json(indent=2), encoding="utf-8")
    half.replace(path)
