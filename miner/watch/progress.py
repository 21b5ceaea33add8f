"""What a run has shown of itself: the events of its progress file, read by offset, added up."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from core.progress import (
    CheckpointEvent,
    EndEvent,
    EvalEvent,
    Event,
    NoteEvent,
    OomEvent,
    StageEvent,
    StepEvent,
    SubmissionEvent,
    events_in,
)
from core.run_files import Score
from miner.watch import files

#: Read at once, and in one look; the rest comes with the next. A training that writes without end must not
#: keep us reading.
CHUNK = 1 << 20
MOST_CHUNKS = 8
#: Steps whose time counts: recent enough to follow a change, many enough not to jump.
RECENT = 64
#: The first steps compile kernels and fill caches.
WARM_UP = 5


class Tail:
    """A progress file from where the last look ended. Torn and foreign lines are counted and skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.skipped = 0

    def read(self) -> list[Event]:
        """What is new. Blocks on the disk: call it off the event loop."""
        found: list[Event] = []
        for _ in range(MOST_CHUNKS):
            data, size = files.read_from(self.path, self.offset, CHUNK)
            if size < self.offset:  # another file than before: whoever made it begins anew
                self.offset = 0
                continue
            before = self.offset
            for line in events_in(data, self.offset):
                self.offset = line.offset
                if line.event is None:
                    self.skipped += 1
                else:
                    found.append(line.event)
            if self.offset == before or len(data) < CHUNK:
                break
        return found


@dataclass
class Course:
    """The run so far. Times are the trainer's own word, which nothing but displays should lean on."""

    began_at: float
    stage: str = ""
    stage_text: str = ""
    step: StepEvent | None = None
    first_step_at: float | None = None
    score: Score | None = None
    best: Score | None = None
    checkpoint: CheckpointEvent | None = None
    submission: SubmissionEvent | None = None
    oom: OomEvent | None = None
    end: EndEvent | None = None
    #: How many submissions were renamed in: a change means a newer one.
    submissions: int = 0
    notes: deque[NoteEvent] = field(default_factory=lambda: deque(maxlen=100))
    #: By our own clock: the last sign of life, and the last optimizer step.
    heard_at: float = 0.0
    stepped_at: float | None = None
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _evals: deque[float] = field(default_factory=lambda: deque(maxlen=8))

    def __post_init__(self) -> None:
        self.heard_at = max(self.heard_at, self.began_at)

    def take(self, event: Event, now: float) -> None:
        # A file that is read again after a restart tells of long ago; nothing tells of the future.
        at = min(event.t, now)
        self.heard_at = max(self.heard_at, at)
        match event:
            case StageEvent():
                self.stage, self.stage_text = event.stage, event.text
            case StepEvent():
                self._step(event, at)
            case EvalEvent():
                self._eval(event)
            case CheckpointEvent():
                self.checkpoint = event
            case SubmissionEvent():
                self.submission = event
                self.submissions += 1
            case OomEvent():
                self.oom = event
            case NoteEvent():
                self.notes.append(event)
            case EndEvent():
                self.end = event

    def away(self, now: float) -> None:
        """Nobody looked until now: its silence says nothing of the time before."""
        self.heard_at = max(self.heard_at, now)

    def _step(self, event: StepEvent, at: float) -> None:
        before = self.step
        if before is not None and event.step > before.step >= WARM_UP:
            seconds = (event.t - before.t) / (event.step - before.step)
            if seconds >= 0:
                self._seconds.append(seconds)
        self.step = event
        self.stage = "train"
        self.stepped_at = max(self.stepped_at or 0.0, at)
        if self.first_step_at is None and event.step > 0:
            self.first_step_at = at

    def _eval(self, event: EvalEvent) -> None:
        self.score = event.score
        if event.best or event.score.beats(self.best):
            self.best = event.score
        if event.seconds is not None:
            self._evals.append(event.seconds)

    @property
    def steps_done(self) -> int:
        return self.step.step if self.step else 0

    @property
    def median_step_s(self) -> float | None:
        return median(self._seconds) if self._seconds else None

    @property
    def slow_step_s(self) -> float | None:
        """The 90th percentile: what a plan should reckon with. None until enough have been seen."""
        if len(self._seconds) < 10:
            return None
        return quantiles(self._seconds, n=10)[-1] or None

    @property
    def eval_s(self) -> float | None:
        return max(self._evals) if self._evals else None
