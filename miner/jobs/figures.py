"""Measurements of one attempt: its curves, thinned as it goes, and its final figures.

The supervisor adds every progress event as it reads it, so showing a running attempt reads no file. At its
end figures and curves are stored. `read_figures` makes the same from a progress file, for attempts that ended
while nobody watched.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from core.planning.plan import GoalPlan, TrainingPlan
from core.planning.time.calibration import expected_speed
from core.runs.progress import EvalEvent, ProgressEvent, StepEvent
from core.runs.run_files import HeldOutScore, RunResult
from miner.api.jobs import AttemptFigures, LiveJob
from miner.jobs.folder import AttemptFolder
from miner.jobs.history import read_plan
from miner.jobs.progress import WARM_UP_STEPS, ProgressTail
from miner.store.attempts import StoredFigures

#: Points of a curve that is stored for good, that is shown of a running attempt, and while it grows.
STORED_POINTS, MAX_POINTS, MAX_GROWING_POINTS = 200, 500, 2000
#: Evaluations of one attempt, steps and bytes: more are not ours.
MAX_EVALS, MAX_COUNT = 2000, 1 << 50
#: Logged steps whose mean is the present speed: one alone may have been short or padded.
_RECENT = 32

CURVES = ("loss", "lr", "tokens_s", "samples_s", "mfu", "wait", "memory_bytes", "grad_norm")
#: Curves whose peaks stay when they are thinned.
_PEAKS = ("loss", "grad_norm", "samples_s")
_MEANS = ("tokens_s", "samples_s", "mfu", "wait")
Column = Sequence[float | None]


def misses(goal: GoalPlan, best: HeldOutScore | None, gain: float | None) -> bool | None:
    """Return whether the best score misses the goal; None if it was not measured. A reward is not a loss."""
    missed = []
    if goal.loss is not None and best is not None and best.lower_is_better:
        missed.append(best.value >= goal.loss)
    if goal.gain is not None and gain is not None:
        missed.append(gain < goal.gain)
    return any(missed) if missed else None


def relative_gain(base: HeldOutScore | None, best: HeldOutScore | None) -> float | None:
    """Return the gain, or None if the base has no score or is zero, as the margins of rewards are."""
    if base is None or best is None or base.metric != best.metric or abs(base.value) < 1e-12:
        return None
    better = base.value - best.value if base.lower_is_better else best.value - base.value
    return _finite(better / abs(base.value))


class FiguresSnapshot(NamedTuple):
    """Figures and curves of one attempt at one moment."""

    figures: AttemptFigures
    #: As `RunCurves.as_dict` has them.
    curves: dict[str, Any]

    def to_stored(self) -> StoredFigures:
        steps = {name: [_short(value) for value in column] for name, column in self.curves["steps"].items()}
        curves = json.dumps({**self.curves, "steps": steps}, separators=(",", ":"))
        return StoredFigures(self.figures.model_dump_json(exclude_none=True), curves)

    @classmethod
    def from_stored(cls, stored: StoredFigures) -> FiguresSnapshot:
        return cls(AttemptFigures.model_validate_json(stored.figures), json.loads(stored.curves))


@dataclass
class _Mean:
    total: float = 0.0
    count: int = 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total, self.count = self.total + value, self.count + 1

    @property
    def value(self) -> float | None:
        return _finite(self.total / self.count) if self.count else None


@dataclass
class RunCurves:
    """Curves over steps. A training that goes back to a checkpoint continues from there: what it had done
    after that is no longer part of it."""

    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    columns: dict[str, list[float | None]] = field(default_factory=lambda: {name: [] for name in CURVES})
    evals: list[EvalEvent] = field(default_factory=list)

    def add_step(self, event: StepEvent, memory_bytes: int | None) -> None:
        if self.steps and event.step <= self.steps[-1]:
            self._go_back_to(event.step)
        self.steps.append(event.step)
        self.times.append(event.t)
        for name, column in self.columns.items():
            column.append(memory_bytes if name == "memory_bytes" else getattr(event, name))
        if len(self.steps) > MAX_GROWING_POINTS:
            self._keep(self._thinned(MAX_GROWING_POINTS // 2))

    def add_eval(self, event: EvalEvent) -> None:
        if len(self.evals) < MAX_EVALS:
            self.evals.append(event)

    def _go_back_to(self, step: int) -> None:
        while step < self.steps[-1] and self.evals and self.evals[-1].score.step >= step:
            self.evals.pop()
        kept = bisect_left(self.steps, step)
        columns: list[list[Any]] = [self.steps, self.times, *self.columns.values()]
        for column in columns:
            del column[kept:]

    def _thinned(self, most: int) -> list[int]:
        return kept_points(self.steps, [self.columns[name] for name in _PEAKS], most)

    def _keep(self, kept: list[int]) -> None:
        self.steps, self.times = [self.steps[at] for at in kept], [self.times[at] for at in kept]
        self.columns = {name: [column[at] for at in kept] for name, column in self.columns.items()}

    def as_dict(self, most: int) -> dict[str, object]:
        """At most `most` points of each curve, and the evaluations."""
        kept = self._thinned(most)
        columns = {name: [column[at] for at in kept] for name, column in self.columns.items()}
        steps = {"step": [self.steps[at] for at in kept], "t": [self.times[at] for at in kept], **columns}
        evals = [
            {"step": event.score.step, "t": event.t, "score": event.score.value, "best": event.best}
            for event in self.evals[-most:]
        ]
        return {"steps": steps, "evals": evals}


class RunFigures:
    """Adds up the events of one attempt."""

    def __init__(self, plan: TrainingPlan | None) -> None:
        self.curves = RunCurves()
        self.base: HeldOutScore | None = None
        self.best: HeldOutScore | None = None
        self.memory_bytes: int | None = None
        #: Memory in use on the attempt's own GPUs, for trainers that do not report it.
        self.gpu_memory: int | None = None
        self._last: StepEvent | None = None
        #: From this step on its speed counts.
        self._warm_at = 0
        # On a CPU the plan's speed is a guess, and its memory the host's, which nobody measures by process.
        on_gpus = plan if plan and not plan.gpus.is_cpu else None
        self._expected = expected_speed(on_gpus) if on_gpus else None
        self._goal = plan.goal if plan else None
        self._estimate = on_gpus.memory.total_bytes if on_gpus else None
        self._means = {name: _Mean() for name in _MEANS}
        self._recent: deque[StepEvent] = deque(maxlen=_RECENT)

    def add(self, event: ProgressEvent) -> None:
        match event:
            case StepEvent():
                self._step(event)
            case EvalEvent(score=score):
                self.curves.add_eval(event)
                if score.step == 0:
                    self.base = self.base or score
                elif event.best or score.beats(self.best):
                    self.best = score

    def _step(self, event: StepEvent) -> None:
        if event.step > MAX_COUNT or not 0 <= (event.memory_bytes or 0) <= MAX_COUNT:
            return
        memory = self.gpu_memory if event.memory_bytes is None else event.memory_bytes
        if memory is not None:
            self.memory_bytes = max(self.memory_bytes or 0, memory)
        self.curves.add_step(event, memory)
        if self._last is None or event.step <= self._last.step:  # it begins, or begins again
            self._warm_at = event.step + WARM_UP_STEPS
        self._last = event
        if event.step >= self._warm_at:
            self._recent.append(event)
            for name, mean in self._means.items():
                mean.add(getattr(event, name))

    def show(self, live: LiveJob) -> None:
        """Fill in the current measurements."""
        live.base_score = self.base.value if self.base else None
        live.best_score = self.best.value if self.best else None
        if (step := self._last) is None:
            return
        live.tokens_s, live.samples_s = step.tokens_s, step.samples_s
        live.mfu, live.wait, live.grad_norm = step.mfu, step.wait, step.grad_norm
        live.memory_bytes = self.gpu_memory if step.memory_bytes is None else step.memory_bytes
        live.memory_estimate_bytes = self._estimate
        live.efficiency = self._efficiency(self._recent_mean("tokens_s"), self._recent_mean("samples_s"))

    def _recent_mean(self, name: str) -> float | None:
        mean = _Mean()
        for event in self._recent:
            mean.add(getattr(event, name))
        return mean.value

    def _efficiency(self, tokens_s: float | None, samples_s: float | None) -> float | None:
        return _finite(self._expected.efficiency(tokens_s, samples_s)) if self._expected else None

    def snapshot(
        self,
        *,
        seconds: float | None = None,
        result: RunResult | None = None,
        utilization: float | None = None,
        points: int = MAX_POINTS,
    ) -> FiguresSnapshot:
        """Current figures of the attempt. The trainer's own result knows the scores of earlier attempts
        too, and stands in for steps that were not logged."""
        base = result.base if result and result.base else self.base
        best = result.best if result and result.best else self.best
        metric, gain = best or base, relative_gain(base, best)
        means = {name: mean.value for name, mean in self._means.items()}
        memory = self.memory_bytes
        if result is not None:
            means["tokens_s"] = result.tokens_s if means["tokens_s"] is None else means["tokens_s"]
            reported = result.memory_bytes
            if memory is None and reported is not None and 0 <= reported <= MAX_COUNT:
                memory = reported
        figures = AttemptFigures(
            steps=self._last.step if self._last else result.steps if result else 0,
            seconds=seconds,
            **means,
            efficiency=self._efficiency(means["tokens_s"], means["samples_s"]),
            memory_bytes=memory,
            memory_estimate_bytes=self._estimate,
            utilization=utilization,
            base=base.value if base else None,
            best=best.value if best else None,
            metric=metric.metric if metric else None,
            lower_is_better=metric.lower_is_better if metric else None,
            gain=gain,
            target=str(self._goal) if self._goal else None,
            target_missed=misses(self._goal, best, gain) if self._goal else None,
        )
        return FiguresSnapshot(figures, self.curves.as_dict(points))


def loss_line(curves: Mapping[str, Any], most: int = 40) -> list[float]:
    """The loss in few points, each the mean of an equal number of those before: for a line of text or a
    small picture."""
    losses = [loss for loss in curves["steps"]["loss"] if loss is not None]
    if len(losses) <= most:
        return losses
    edges = [at * len(losses) // most for at in range(most + 1)]
    means = (sum(losses[begin:end]) / (end - begin) for begin, end in pairwise(edges))
    return [float(f"{mean:.6g}") for mean in means if math.isfinite(mean)]


def read_figures(folder: AttemptFolder) -> RunFigures:
    """Read from the progress file, or repeat the last result if the file has not changed since. Blocks on the
    disk."""
    try:
        status = folder.progress.lstat()
    except OSError:
        return RunFigures(read_plan(folder))
    return _read_figures(folder.path, (status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=16)
def _read_figures(path: Path, _identity: tuple[int, int, int]) -> RunFigures:
    folder = AttemptFolder(path)
    figures = RunFigures(read_plan(folder))
    for event in ProgressTail(folder.progress).read_all():
        figures.add(event)
    return figures


def _finite(value: float | None) -> float | None:
    """Drop a number that overflowed in the training."""
    return value if value is not None and math.isfinite(value) else None


def _short(value: float | None) -> float | None:
    """Six digits are enough for a picture, and shorter in JSON; a time has eleven."""
    return float(f"{value:.{11 if abs(value) >= 1e9 else 6}g}") if isinstance(value, float) else value


def kept_points(x: Sequence[float], columns: Sequence[Column], most: int) -> list[int]:
    """The indices of at most `most` points: the first, the last, and of every equal range of `x`, which
    rises, those with the lowest and the highest value of each column."""
    count = len(x)
    if count <= most:
        return list(range(count))
    ranges = max((most - 2) // (2 * max(len(columns), 1)), 1)
    kept = {0, count - 1}
    width, start = (x[-1] - x[0]) / ranges, 0
    for number in range(1, ranges + 1):
        end = count if number == ranges else bisect_left(x, x[0] + number * width, start)
        if end > start:
            for column in columns:
                kept.update(_peaks(column, start, end))
        start = end
    return sorted(kept)


def _peaks(column: Column, start: int, end: int) -> tuple[int, ...]:
    part = column[start:end]
    known = [value for value in part if value is not None]
    if not known:
        return (start,)
    return start + part.index(min(known)), start + part.index(max(known))
