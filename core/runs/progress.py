"""The progress file: one JSON line per event, instead of log text that somebody would have to parse.

The trainer appends with `encode_event`, one write per line; the daemon tails the file with `parse_events`, by
byte offset. A torn or unknown line is skipped and counted, never an error: the file comes from the container,
and an older daemon may read that of a newer trainer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from core.domain.records import Record, SanitizedText
from core.domain.units import show_bytes, show_seconds
from core.runs.run_files import HeldOutScore, RunEnd

#: Longer lines are skipped: they are not the trainer's.
MAX_LINE = 64 * 1024


class _Event(Record):
    """`t` is seconds since the epoch."""

    t: float


class StageEvent(_Event):
    """The trainer enters a stage: "data", "load", "train", "evaluate", "save", "average", …"""

    event: Literal["stage"] = "stage"
    stage: str = Field(max_length=40)
    text: SanitizedText = Field(default="", max_length=1000)


class StepEvent(_Event):
    """Optimizer steps were done, `step` in all."""

    event: Literal["step"] = "step"
    step: int = Field(ge=0)
    total: int | None = Field(default=None, ge=0)
    epoch: float | None = None
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_s: float | None = None
    #: As `BatchPlan` counts them: sequences (packed ones hold several rows), pairs, completions, images.
    samples_s: float | None = None
    mfu: float | None = None
    #: Of the GPU with the most memory in use.
    memory_bytes: int | None = None
    #: Share of the time that the GPU waited for data.
    wait: float | None = None
    #: When the trainer expects to end, seconds since the epoch.
    ends_at: float | None = None


class EvalEvent(_Event):
    event: Literal["eval"] = "eval"
    score: HeldOutScore
    #: Better than everything before.
    best: bool = False
    seconds: float | None = None


class CheckpointEvent(_Event):
    """A complete checkpoint is at `path`."""

    event: Literal["checkpoint"] = "checkpoint"
    step: int = Field(ge=0)
    path: str = Field(max_length=4096)


class SubmissionEvent(_Event):
    """A complete submission was renamed into its place."""

    event: Literal["submission"] = "submission"
    score: HeldOutScore | None = None
    step: int = Field(ge=0)


class OomEvent(_Event):
    event: Literal["oom"] = "oom"
    #: "train", "evaluation" or "generation".
    moment: str = Field(default="train", max_length=40)
    text: SanitizedText = Field(default="", max_length=2000)


class NoteEvent(_Event):
    """Something that the operator should see: a reward function that failed, a rate that was changed."""

    event: Literal["note"] = "note"
    kind: str = Field(max_length=40)
    text: SanitizedText = Field(max_length=2000)


class ControlEvent(_Event):
    """A request of the control file was carried out, cannot be, or was undone."""

    event: Literal["control"] = "control"
    #: 0: nobody asked; the engine begins with other passes than planned.
    number: int = Field(ge=0)
    applied: bool
    #: What holds from now on.
    micro: int = Field(ge=1)
    duty: float = 1.0
    text: SanitizedText = Field(default="", max_length=1000)


class EndEvent(_Event):
    event: Literal["end"] = "end"
    end: RunEnd
    submission: bool
    text: SanitizedText = Field(default="", max_length=2000)


ProgressEvent = Annotated[
    StageEvent
    | StepEvent
    | EvalEvent
    | CheckpointEvent
    | SubmissionEvent
    | OomEvent
    | NoteEvent
    | ControlEvent
    | EndEvent,
    Field(discriminator="event"),
]
_EVENT: TypeAdapter[ProgressEvent] = TypeAdapter(ProgressEvent)


def encode_event(event: ProgressEvent) -> bytes:
    return event.model_dump_json(exclude_none=True).encode() + b"\n"


class ProgressLine(NamedTuple):
    event: ProgressEvent | None
    #: Of the file: where the next line begins.
    offset: int


def parse_events(data: bytes, offset: int = 0) -> Iterator[ProgressLine]:
    """The complete lines of `data`, which begins at `offset` of the file; an incomplete last one is left."""
    start = 0
    while (end := data.find(b"\n", start)) >= 0:
        line, start = data[start:end], end + 1
        yield ProgressLine(_parsed(line), offset + start)
    if len(data) - start > MAX_LINE:
        yield ProgressLine(None, offset + len(data))


def _parsed(line: bytes) -> ProgressEvent | None:
    if not line.strip() or len(line) > MAX_LINE:
        return None
    try:
        return _EVENT.validate_json(line)
    except ValidationError:
        return None


#: Steps are printed this often.
STEP_LINE_EVERY_S = 2.0


class EventPrinter:
    """Print one line per event; steps at most every `STEP_LINE_EVERY_S`."""

    def __init__(self, write: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self._write, self._now, self._next = write, now, 0.0

    def __call__(self, event: ProgressEvent) -> None:
        if isinstance(event, StepEvent):
            now = self._now()
            if now < self._next and event.step != event.total:
                return
            self._next = now + STEP_LINE_EVERY_S
        if text := event_line(event):
            self._write(text)


def event_line(event: ProgressEvent) -> str:
    match event.event:
        case "step":
            return _step_line(event) if isinstance(event, StepEvent) else ""
        case "stage":
            return f"{event.stage}: {event.text}" if isinstance(event, StageEvent) and event.text else ""
        case "note":
            return f"{event.kind}: {event.text}" if isinstance(event, NoteEvent) else ""
        case "eval":
            best = ", the best so far" if event.best else ""
            return f"step {event.score.step:,}: {event.score.metric} {event.score.value:.4f}{best}"
        case "checkpoint":
            return f"step {event.step:,}: state saved"
        case "oom":
            return f"out of memory in {event.moment}: {event.text}"
        case "control":
            return f"control: {event.text}"
    return ""


def _step_line(event: StepEvent) -> str:
    total = f"/{event.total:,}" if event.total else ""
    parts = [f"step {event.step:,}{total}"]
    parts += [f"loss {event.loss:.4f}"] if event.loss is not None else ["loss NaN"]
    parts += [f"lr {event.lr:.2e}"] if event.lr is not None else []
    parts += [f"{event.tokens_s:,.0f} tokens/s"] if event.tokens_s else []
    parts += [f"MFU {event.mfu:.0%}"] if event.mfu else []
    parts += [f"waits {event.wait:.1%}"] if event.wait is not None else []
    parts += [show_bytes(event.memory_bytes)] if event.memory_bytes else []
    parts += [f"{show_seconds(max(event.ends_at - event.t, 0))} left"] if event.ends_at else []
    return "  ".join(parts)
