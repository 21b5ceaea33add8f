"""When to evaluate, save and stop: by the time that is left, and by scores that no longer improve."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, pstdev
from typing import NamedTuple

from core.planning.plan import TrainingPlan
from core.planning.time.calibration import MeasuredRun, recalibrate
from core.planning.time.schedule import EVALUATIONS, repeat_count
from core.runs.run_files import HeldOutScore

#: The first steps allocate, compile and warm caches: they are not like the later ones.
UNUSUAL_STEPS = 3
#: Steps remembered. Rows differ in length, so one step is no measure.
WINDOW = 64
#: Evaluations, submissions and saves remembered.
LATEST = 4
#: Evaluations may take this share of the time.
EVAL_SHARE = 0.1
#: Evaluations may take the same share of the time that is left after all wanted steps, up to these seconds: a
#: very short training is evaluated as often as was asked, and nobody pays for an hour of it.
SPARE_S = 60.0
#: One checkpoint may take this share of the time that is left.
SAVE_SHARE = 0.03
#: The first submission comes after this share of the steps: whatever happens later, there is one.
FIRST_SHARE = 0.03
#: Kept free between the forecast end of the last save and `end_by`: part of what is forecast, and seconds.
SLACK_SHARE, SLACK_S = 0.25, 1.0
#: A new forecast after this long, and whenever the steps have doubled: the first ones matter most.
FORECAST_S = 5.0
#: Asked to stop, a run takes this long at most for its last evaluation and for a checkpoint, each.
STOP_GRACE_S = 20.0
#: From this many measured steps on, their mean is better than the plan's guess.
ENOUGH_STEPS = 3


class StepOrders(NamedTuple):
    """Orders after a step; the same on all ranks."""

    total: int
    evaluate: bool = False
    save: bool = False
    #: The time is over.
    stop: bool = False


@dataclass
class RunClock:
    plan: TrainingPlan
    #: Seconds since the epoch: the last save is over by then.
    end_by: float
    now: Callable[[], float] = time.time
    #: Steps that were done when this process began.
    done: int = 0
    total: int = 0
    #: Share of the time in which the GPU computes: after each step there is a pause.
    duty: float = 1.0
    eval_every: int = 1
    save_every: int = 1
    _steps: deque[float] = field(default_factory=partial(deque, maxlen=WINDOW))
    _unusual: int = 0
    _evaluations: deque[float] = field(default_factory=partial(deque, maxlen=LATEST))
    _submissions: deque[float] = field(default_factory=partial(deque, maxlen=LATEST))
    _saves: deque[float] = field(default_factory=partial(deque, maxlen=LATEST))
    _probed: bool = False
    _evaluated: int = -1
    _saved: int = -1
    #: Steps that were timed, and when there are enough new ones for another forecast.
    _measured: int = 0
    _forecast_at: float = -math.inf
    _forecast_again: int = 0

    def __post_init__(self) -> None:
        steps = self.plan.steps
        # Until steps have been timed, all wanted steps: a plan that guessed too few must not let the rate
        # decay.
        self.total, self.eval_every, self.save_every = self.wanted, steps.eval_every, steps.save_every
        self._evaluated = self._saved = self.done

    @property
    def wanted(self) -> int:
        """All wanted steps: more than the plan's where the time allowed fewer."""
        return max(self.plan.steps.wanted or self.plan.steps.total, self.plan.steps.total)

    def resumed(self, step: int) -> None:
        """This process resumes at the step where another one stopped."""
        self.done = self._evaluated = self._saved = step

    # — what was measured

    def stepped(self, seconds: float) -> None:
        self.done += 1
        if self._unusual < min(UNUSUAL_STEPS, self.wanted // 4):
            self._unusual += 1
        else:
            self._steps.append(seconds)
            self._measured += 1

    def speed_changed(self) -> None:
        """Steps are different from now on: only the latest still count, until there are new ones."""
        while len(self._steps) > ENOUGH_STEPS:
            self._steps.popleft()

    def evaluated(self, seconds: float) -> None:
        self._evaluations.append(seconds)
        self._evaluated = self.done

    def submitted(self, seconds: float) -> None:
        self._submissions.append(seconds)

    def saved(self, seconds: float) -> None:
        self._saves.append(seconds)
        self._saved = self.done

    # — what follows

    @property
    def left(self) -> float:
        return self.end_by - self.now()

    @property
    def sure(self) -> bool:
        """Return True once enough steps have been timed to tell how long one takes."""
        return len(self._steps) >= ENOUGH_STEPS

    @property
    def step_s(self) -> float:
        """The mean step with its pause, plus its standard error, so that a lucky sample does not suggest too
        much."""
        if not self.sure:
            return max(self._steps, default=self.plan.time.step_s) / self.duty
        seconds = fmean(self._steps) + pstdev(self._steps) / math.sqrt(len(self._steps))
        return seconds / self.duty

    @property
    def eval_s(self) -> float:
        if not self.plan.steps.eval_rows:
            return 0.0
        planned = self.plan.time["evaluate"] / (
            repeat_count(self.plan.steps.total, self.plan.steps.eval_every) + 1
        )
        return _latest(self._evaluations, planned)

    @property
    def submission_s(self) -> float:
        return _latest(self._submissions, self.save_s)

    @property
    def save_s(self) -> float:
        saves = repeat_count(self.plan.steps.total, self.plan.steps.save_every)
        return _latest(self._saves, self.plan.time["save"] / max(saves, 1))

    @property
    def finish_s(self) -> float:
        """From the decision to stop to the last save's end."""
        return _with_slack(self.eval_s + self.submission_s)

    def room_for(self, seconds: float) -> bool:
        """Return whether `seconds` of work fit before the finish must begin."""
        return self.left >= seconds + self.finish_s

    def after_step(self) -> StepOrders:
        """Decide what happens after a step; called on rank 0."""
        if self.now() - self._forecast_at >= FORECAST_S or self._measured >= self._forecast_again:
            self.forecast()
        # One more step must fit too: what is decided now holds until the next one's end.
        over = self.left < self.finish_s + self.step_s
        stop = over or self.done >= self.total
        if stop and self.done < self.wanted and not (self._submissions or self._probed):
            # What the finish costs is only guessed: done now it is known, and nothing is lost if it is all.
            self._probed = True
            self.total, self._forecast_at = self.wanted, -math.inf
            return StepOrders(total=self.total, evaluate=True)
        evaluate = not stop and self._evaluation_due()
        save = evaluate and self._save_due()
        return StepOrders(total=self.total, evaluate=evaluate, save=save, stop=stop)

    def _evaluation_due(self) -> bool:
        since = self.done - self._evaluated
        first = self._evaluated <= 0 and self.done >= self._first_at()
        return (since >= self.eval_every or first) and self.room_for(self.eval_s + self.submission_s)

    def _save_due(self) -> bool:
        affordable = self.save_s <= SAVE_SHARE * self.left and self.room_for(self.save_s)
        return self.done - self._saved >= self.save_every and affordable

    def _first_at(self) -> int:
        early = max(math.ceil(FIRST_SHARE * self.total), 1)
        cheap = self.eval_s <= EVAL_SHARE / 4 * max(self.left, 0.0)
        return min(early, self.eval_every) if cheap else self.eval_every

    def forecast(self) -> None:
        """Set the number of steps that the measured speed allows, and the interval of evaluations."""
        self._forecast_at, self._forecast_again = self.now(), max(2 * self._measured, ENOUGH_STEPS)
        # With too few timed steps, the plan's own guess is no worse.
        if self.sure:
            self.total = max(self._recalibrated().steps.total, self.done)
        step_s = max(self.step_s, 1e-9)
        wanted_every = min(self.plan.steps.eval_every, max(self.total // EVALUATIONS, 1))
        self.eval_every = max(wanted_every, self._evaluations_apart(step_s), 1)
        saving = math.ceil(self.save_s / (EVAL_SHARE * step_s))
        self.save_every = max(min(self.plan.steps.save_every, self.total), saving, self.eval_every)

    def _evaluations_apart(self, step_s: float) -> int:
        """Steps between two, so that all together keep to their share: of the steps' time, or of what the
        steps and the finish leave over."""
        steps = max(self.total, 1)
        spare = self.left - self.finish_s - (self.wanted - self.done) * step_s
        share = max(EVAL_SHARE * steps * step_s, min(EVAL_SHARE * spare, SPARE_S))
        return math.ceil(steps * self.eval_s / share)

    def _recalibrated(self) -> TrainingPlan:
        """The planner's own arithmetic. It counts from the moment of planning to the deadline less the
        reserve, which is `end_by` here."""
        time_of_plan = self.plan.time
        elapsed = time_of_plan.deadline_s - time_of_plan.reserve_s - self.left
        measured = MeasuredRun(
            steps_done=self.done,
            elapsed_s=max(elapsed, 0.0),
            step_s=max(self.step_s, 1e-9),
            eval_s=self.eval_s,
            # A checkpoint that costs too much is not written: it must not cost steps either.
            save_s=min(self.save_s, SAVE_SHARE * max(self.left, 0.0)),
            publish_s=self.finish_s,
        )
        return recalibrate(self._true_to(elapsed), measured)

    def _true_to(self, elapsed: float) -> TrainingPlan:
        """More time than the plan knew of (a clock set back, a deadline moved): move the plan's end as
        well."""
        if elapsed >= 0:
            return self.plan
        longer = self.plan.time.model_copy(update={"deadline_s": self.plan.time.deadline_s - elapsed})
        return self.plan.model_copy(update={"time": longer})


def _with_slack(seconds: float) -> float:
    return seconds * (1 + SLACK_SHARE) + SLACK_S


def _latest(measured: Sequence[float], planned: float) -> float:
    """The worst of the last few: a slow disk or a long batch may come again."""
    return max(measured, default=planned)


@dataclass
class BestScore:
    #: Evaluations without a better one before the training stops, or None for never.
    patience: int | None = None
    score: HeldOutScore | None = None
    #: The untouched model's.
    base: HeldOutScore | None = None
    waited: int = 0

    def update(self, score: HeldOutScore) -> bool:
        """Take a score; return True if it is better than everything before. NaN is never better."""
        better = math.isfinite(score.value) and score.beats(self.score)
        if better:
            self.score, self.waited = score, 0
        else:
            self.waited += 1
        return better

    @property
    def exhausted(self) -> bool:
        return self.patience is not None and self.waited >= self.patience
