"""One JSON line per event: how a training says what it does. Nobody parses human log text.

The trainer appends with `line_of`, one write per line; the daemon tails the file with `events_in`, by byte
offset. A torn or unknown line is skipped and counted, never an error: the file comes from the container, and
an older daemon may read a newer trainer's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from core.facts import Record, Said
from core.run_files import RunEnd, Score

#: A longer line is not one of ours.
MAX_LINE = 64 * 1024


class _Event(Record):
    """`t` is seconds since the epoch."""

    t: float


class StageEvent(_Event):
    """What the trainer does now: "data", "load", "train", "evaluate", "save", "average", …"""

    event: Literal["stage"] = "stage"
    stage: str = Field(max_length=40)
    text: Said = Field(default="", max_length=1000)


class StepEvent(_Event):
    """One optimizer step, or several: `step` is how many are done."""

    event: Literal["step"] = "step"
    step: int = Field(ge=0)
    total: int | None = Field(default=None, ge=0)
    epoch: float | None = None
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_s: float | None = None
    mfu: float | None = None
    #: Of the fullest GPU.
    memory_bytes: int | None = None
    #: Share of the time in which the GPU waited for data.
    wait: float | None = None
    #: When the trainer thinks that it will end, seconds since the epoch.
    ends_at: float | None = None


class EvalEvent(_Event):
    event: Literal["eval"] = "eval"
    score: Score
    #: Better than everything before.
    best: bool = False
    seconds: float | None = None


class CheckpointEvent(_Event):
    """A state to resume from lies complete at `path`."""

    event: Literal["checkpoint"] = "checkpoint"
    step: int = Field(ge=0)
    path: str = Field(max_length=4096)


class SubmissionEvent(_Event):
    """A complete submission was renamed in."""

    event: Literal["submission"] = "submission"
    score: Score | None = None
    step: int = Field(ge=0)


class OomEvent(_Event):
    event: Literal["oom"] = "oom"
    #: "train", "evaluation" or "generation".
    moment: str = Field(default="train", max_length=40)
    text: Said = Field(default="", max_length=2000)


class NoteEvent(_Event):
    """Something that an operator should see: a reward function that failed, a rate that was changed."""

    event: Literal["note"] = "note"
    kind: str = Field(max_length=40)
    text: Said = Field(max_length=2000)


class EndEvent(_Event):
    event: Literal["end"] = "end"
    end: RunEnd
    submission: bool
    text: Said = Field(default="", max_length=2000)


Event = Annotated[
    StageEvent | StepEvent | EvalEvent | CheckpointEvent | SubmissionEvent | OomEvent | NoteEvent | EndEvent,
    Field(discriminator="event"),
]
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


def line_of(event: Event) -> bytes:
    return event.model_dump_json(exclude_none=True).encode() + b"\n"


class Line(NamedTuple):
    event: Event | None
    #: Where the next line begins.
    offset: int


def events_in(data: bytes, offset: int = 0) -> Iterator[Line]:
    """The whole lines of `data`, which begins at `offset` of the file; an unfinished last one is left."""
    start = 0
    while (end := data.find(b"\n", start)) >= 0:
        line, start = data[start:end], end + 1
        yield Line(_parsed(line), offset + start)
    if len(data) - start > MAX_LINE:
        yield Line(None, offset + len(data))


def _parsed(line: bytes) -> Event | None:
    if not line.strip() or len(line) > MAX_LINE:
        return None
    try:
        return _EVENT.validate_json(line)
    except ValidationError:
        return None
