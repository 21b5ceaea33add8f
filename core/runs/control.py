"""The control file: what the daemon asks of a running training, which obeys between two steps.

The daemon replaces the whole file; the trainer reads it on rank 0, agrees on it with all ranks, and reports
a `ControlEvent`. The effective batch never changes: smaller micro-batches are accumulated more often.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from core.domain.records import Record
from core.system.files import write_atomically

CONTROL_FILE = "control.json"
#: A file that is longer is not ours.
MAX_CONTROL_BYTES = 4096


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
