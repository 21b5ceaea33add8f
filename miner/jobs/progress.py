"""The progress of a run: read the events of its progress file, add them up, and notice a standstill.

A hang writes nothing, so only time without an event shows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

from core.domain.units import show_seconds
from core.runs.progress import (
    CheckpointEvent,
    ControlEvent,
    EndEvent,
    EvalEvent,
    NoteEvent,
    OomEvent,
    ProgressEvent,
    StageEvent,
    StepEvent,
    SubmissionEvent,
    parse_events,
)
from core.runs.run_files import HeldOutScore
from miner.fleet.sampler import SampleHistory
from miner.jobs.timeline import JobTimings
from miner.support.untrusted_files import read_untrusted_from

#: Bytes of one read, and reads at a time; the rest comes with the next. A training that writes without end
#: must not keep us reading.
CHUNK = 1 << 20
MAX_CHUNKS = 8
#: Reads of a complete file, one chunk each: parsed events take a dozen times as much memory.
MAX_READS = 512
#: Steps whose time counts: recent enough to follow a change, many enough for a steady median.
RECENT_STEPS = 64
#: The first steps compile kernels and fill caches.
WARM_UP_STEPS = 5
#: A standstill with idle GPUs is believed in this part of the time. Busy GPUs prove nothing: NCCL waits for a
#: rank that is gone with a kernel that runs.
IDLE_PATIENCE = 0.5
#: A save may take this many times its planned duration.
LONGEST_SAVE = 4.0
#: A GPU below this use counts as idle, once this long after the last event: until then it finishes its step.
IDLE, IDLE_AFTER_S = 0.02, 30.0
#: A longer time without a measurement may have been one of work.
MOST_UNSEEN_S = 60.0


class ProgressTail:
    """Reads a progress file from where the last read ended; counts and skips torn and foreign lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.skipped = 0

    def read(self, chunks: int = MAX_CHUNKS) -> list[ProgressEvent]:
        """Return the new events. Blocks on the disk: call it off the event loop."""
        events: list[ProgressEvent] = []
        for _ in range(chunks):
            data, size = read_untrusted_from(self.path, self.offset, CHUNK)
            if size < self.offset:  # another file than before: read it from its beginning
                self.offset = 0
                continue
            before = self.offset
            for line in parse_events(data, self.offset):
                self.offset = line.offset
                if line.event is None:
                    self.skipped += 1
                else:
                    events.append(line.event)
            if self.offset == before or len(data) < CHUNK:
                break
        return events

    def read_all(self) -> Iterator[ProgressEvent]:
        """The events of a whole file, but not the end of half a gigabyte."""
        for _ in range(MAX_READS):
            before = self.offset
            yield from self.read(chunks=1)
            if self.offset == before:
                return


@dataclass
class RunProgress:
    """The run so far. Times are the trainer's own word, which only displays should rely on."""

    began_at: float
    stage: str = ""
    step: StepEvent | None = None
    first_step_at: float | None = None
    score: HeldOutScore | None = None
    checkpoint: CheckpointEvent | None = None
    submission: SubmissionEvent | None = None
    oom: OomEvent | None = None
    end: EndEvent | None = None
    #: The last answer to a request of the control file.
    control: ControlEvent | None = None
    #: Sequences of a pass that the engine itself found to fit.
    found_micro: int | None = None
    #: Count of submissions put in place: a change means a newer one.
    submissions: int = 0
    notes: deque[NoteEvent] = field(default_factory=lambda: deque(maxlen=100))
    #: By our own clock: the last event, and the last optimizer step.
    last_event_at: float = 0.0
    last_step_at: float | None = None
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    _evals: deque[float] = field(default_factory=lambda: deque(maxlen=8))

    def __post_init__(self) -> None:
        self.last_event_at = max(self.last_event_at, self.began_at)

    def add(self, event: ProgressEvent, now: float) -> None:
        # A file read again after a restart has old events; none can be from the future.
        at = min(event.t, now)
        self.last_event_at = max(self.last_event_at, at)
        match event:
            case StageEvent():
                self.stage = event.stage
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
            case ControlEvent():
                self.control = event
                if event.number == 0:
                    self.found_micro = event.micro
            case EndEvent():
                self.end = event

    def excuse_silence(self, now: float) -> None:
        """Nobody read the file until now: its silence before means nothing."""
        self.last_event_at = max(self.last_event_at, now)

    def _step(self, event: StepEvent, at: float) -> None:
        before = self.step
        if before is not None and event.step > before.step >= WARM_UP_STEPS:
            seconds = (event.t - before.t) / (event.step - before.step)
            if seconds >= 0:
                self._seconds.append(seconds)
        self.step = event
        self.stage = "train"
        self.last_step_at = max(self.last_step_at or 0.0, at)
        if self.first_step_at is None and event.step > 0:
            self.first_step_at = at

    def _eval(self, event: EvalEvent) -> None:
        self.score = event.score
        if event.seconds is not None:
            self._evals.append(event.seconds)

    @property
    def steps_done(self) -> int:
        return self.step.step if self.step else 0

    def grown_micro(self, planned: int) -> int | None:
        """Sequences of a pass, where a request made them more than the engine began with."""
        asked = self.control.micro if self.control is not None and self.control.number else 0
        return asked if asked > max(planned, self.found_micro or 0) else None

    @property
    def median_step_s(self) -> float | None:
        return median(self._seconds) if self._seconds else None

    @property
    def slow_step_s(self) -> float | None:
        """The 90th percentile, which a plan should expect. None until there are enough steps."""
        if len(self._seconds) < 10:
            return None
        return quantiles(self._seconds, n=10)[-1] or None

    @property
    def eval_s(self) -> float | None:
        return max(self._evals) if self._evals else None


def stall_reason(
    progress: RunProgress, now: float, timings: JobTimings, *, gpus_idle: bool = False, save_s: float = 0.0
) -> str | None:
    """Return why the run counts as hung, or None. `gpus_idle`: see `idle_since_last_event`; a save, during
    which GPUs idle too, takes about `save_s`."""
    silent = now - max(progress.last_event_at, progress.began_at)
    step_s = progress.median_step_s
    if progress.stage == "train" and step_s is not None:
        limit = max(timings.stall_min_s, timings.stall_factor * step_s)
        what = f"no step for {show_seconds(silent)}, where one takes {show_seconds(step_s)}"
        if gpus_idle:
            limit = min(limit, max(limit * IDLE_PATIENCE, LONGEST_SAVE * save_s))
            what = f"{what}, and its GPUs were idle all the while"
    else:
        limit = timings.start_limit_s
        what = f"no event for {show_seconds(silent)} in stage {progress.stage or 'start'!r}"
    return what if silent > limit else None


def idle_since_last_event(
    progress: RunProgress, samples: SampleHistory, gpus: Iterable[str], now: float
) -> bool:
    """Return True if each of its GPUs was seen idle since the run's last event. Unobserved time may
    have been work: without measurements, or with a gap in them, the answer is False."""
    since = max(progress.last_event_at, progress.began_at) + IDLE_AFTER_S
    names = list(gpus)
    if now - since < MOST_UNSEEN_S:
        return False
    for gpu in names:
        seen = samples.since(gpu, since)
        moments = [since, *(sample.at for sample in seen), now]
        if any(after - before > MOST_UNSEEN_S for before, after in pairwise(moments)):
            return False
        if any(sample.utilization is None or sample.utilization > IDLE for sample in seen):
            return False
    return bool(names)
