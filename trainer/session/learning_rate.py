"""The learning rate: its schedule, its reaction to a plateau, and the search for its peak.

The number of steps is a forecast that the clock keeps correcting, so the schedule spreads what is left of
the way over the steps that are left: a new forecast bends the curve and never makes it jump.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from core.domain.choices import LrSchedule
from core.domain.evaluation import RewardScore
from core.domain.evaluation import gains_over_base as rewarded_gains
from core.planning.plan import LrSearchPlan, OptimizerPlan, PlateauPlan
from trainer.session.ranks import Communicator

#: Where one-cycle begins, as a share of the peak.
ONE_CYCLE_START = 1 / 25


@dataclass
class ScheduleProgress:
    """The progress of a training from 0 to 1, over a forecast number of steps."""

    total: int
    #: Steps up to the peak, if the training is long enough.
    asked_warmup: int = 0
    done: int = 0
    fraction: float = 0.0
    #: Where the warmup ended.
    warmed: float = field(default=0.0)

    @property
    def warmup(self) -> int:
        """At most half of the steps, so that a shortened run reaches the peak too."""
        return min(self.asked_warmup, self.total // 2)

    def advance(self) -> None:
        """One more step is done."""
        self.fraction += (1 - self.fraction) / max(self.total - self.done, 1)
        self.done += 1
        if self.done <= self.warmup:
            self.warmed = self.fraction

    def forecast(self, total: int) -> None:
        """Correct the number of steps; it is never less than those done."""
        self.total = max(total, self.done)

    @property
    def decayed(self) -> float:
        """The progress since the warmup, from 0 to 1."""
        left = 1 - self.warmed
        return (self.fraction - self.warmed) / left if left > 0 else 1.0

    def state(self) -> dict[str, float]:
        return {"done": self.done, "fraction": self.fraction, "warmed": self.warmed, "total": self.total}

    def restore(self, state: dict[str, float]) -> None:
        self.done, self.total = int(state["done"]), int(state["total"])
        self.fraction, self.warmed = float(state["fraction"]), float(state["warmed"])


def rate_factor(plan: OptimizerPlan, schedule: ScheduleProgress) -> float:
    """The factor on the peak rate for the step that comes next."""
    if plan.schedule is LrSchedule.CONSTANT:
        return _stage_factor(plan, schedule.fraction)
    if schedule.done < schedule.warmup:
        # Not from zero: a first step at a rate of nothing is a step thrown away.
        return _warmup_factor(plan, (schedule.done + 1) / schedule.warmup) * _stage_factor(
            plan, schedule.fraction
        )
    shape = _decay_factor(plan, schedule)
    return (plan.min_lr_ratio + (1 - plan.min_lr_ratio) * shape) * _stage_factor(plan, schedule.fraction)


def _warmup_factor(plan: OptimizerPlan, fraction: float) -> float:
    """Linear; for one-cycle from a 25th along a cosine, as its inventors' implementations do."""
    if plan.schedule is LrSchedule.ONE_CYCLE:
        return ONE_CYCLE_START + (1 - ONE_CYCLE_START) * (1 - _cosine(fraction))
    return fraction


def _decay_factor(plan: OptimizerPlan, schedule: ScheduleProgress) -> float:
    """From 1 at the peak to 0."""
    fraction = min(max(schedule.decayed, 0.0), 1.0)
    match plan.schedule:
        case LrSchedule.CONSTANT_WITH_WARMUP:
            return 1.0
        case LrSchedule.LINEAR:
            return 1 - fraction
        case LrSchedule.COSINE_WITH_RESTARTS:
            # The way is a sum of parts: a hair short of a restart is the restart.
            return _cosine((fraction * plan.cycles + 1e-9) % 1.0 if fraction < 1 else 1.0)
        case LrSchedule.WSD:
            cooldown = plan.cooldown_share or 0.0
            if cooldown <= 0:
                return 1.0
            return min((1 - schedule.fraction) / cooldown, 1.0)
        case _:
            return _cosine(fraction)


def _cosine(fraction: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * fraction))


def _stage_factor(plan: OptimizerPlan, fraction: float) -> float:
    """The factor of the stage that this point lies in; 1 without stages."""
    reached = 0.0
    for stage in plan.stages:
        reached += stage.share
        if fraction < reached - 1e-9:
            return stage.factor
    return plan.stages[-1].factor if plan.stages else 1.0


#: However long a plateau lasts or a score improves, the rate stays within these factors of the schedule's.
MIN_FACTOR, MAX_FACTOR = 0.1, 1.5


@dataclass
class PlateauFactor:
    plan: PlateauPlan
    factor: float = 1.0
    #: Evaluations since the last better one.
    waited: int = 0

    def update(self, better: bool) -> str | None:
        """After an evaluation: a text of what changed, or None."""
        before = self.factor
        if better:
            self.waited = 0
            self.factor = min(self.factor * self.plan.growth, MAX_FACTOR)
        else:
            self.waited += 1
            if self.waited >= self.plan.patience:
                self.waited = 0
                self.factor = max(self.factor * self.plan.factor, MIN_FACTOR)
        if self.factor == before:
            return None
        why = "improves" if better else f"has not improved in {self.plan.patience} evaluations"
        return f"learning rate × {self.factor:.3g} (was × {before:.3g}): the score {why}"

    def state(self) -> dict[str, float]:
        return {"factor": self.factor, "waited": self.waited}

    def restore(self, state: dict[str, float]) -> None:
        self.factor, self.waited = float(state["factor"]), int(state["waited"])


#: From one candidate to the next: two to a power of ten.
RUNG = math.sqrt(10.0)
#: A candidate may exceed a bound by this much: the bound is meant to include it.
BOUND_TOLERANCE = 0.02
#: Steps of a candidate at least: fewer only show noise.
MIN_STEPS = 6
#: And at most: by then the rates differ clearly, and the time is better spent on training.
MAX_STEPS = 100
#: Candidates that the time is divided among: the planned rate, one on either side, and one more; fewer where
#: each would have too few steps.
CANDIDATES = (4, 3, 2)
#: Steps that are timed beforehand, and how many of them are warm-up.
TIMED_STEPS, UNUSUAL = 3, 1
#: Two steps are a small sample: the others may take longer.
SLOWER = 1.2
#: A probe warms up over this part of it and falls linearly afterwards, as a whole training would.
WARMUP = 0.1
#: A loss this many times that of the first step has diverged; below the floor a loss is no evidence.
DIVERGED, FLOOR = 2.0, 0.1
#: A candidate gains nearly as much as the best within this share: the highest rate of those moves furthest in
#: a longer run.
NEARLY = 0.025
#: Rewards of sampled completions differ by this much between equally good models.
SAMPLED_NOISE = 0.05


class Prober(Protocol):
    """Training steps that are undone afterwards. All ranks call every method."""

    def begin(self) -> None:
        """Remember the weights."""

    def step(self, factor: float, place: int) -> float:
        """An optimizer step at this factor on the peak rate, on the batch of this place; its loss."""

    def restore(self) -> None:
        """Weights, optimizer and randomness as they were at `begin`."""

    def end(self) -> None:
        """Free everything that was remembered."""


class Probe(NamedTuple):
    """One candidate: the factor on the planned rate, and the held-out score; None when it diverged."""

    factor: float
    score: float | None
    #: What the score is made of, where one number is not enough.
    rewarded: RewardScore | None = None


@dataclass
class LrSearch:
    plan: LrSearchPlan
    prober: Prober
    ranks: Communicator
    now: Callable[[], float]
    #: The held-out score of the model as it is.
    score: Callable[[], float]
    lower_is_better: bool
    #: What the last score was made of.
    rewarded: Callable[[], RewardScore | None] = lambda: None
    #: Seconds that scoring takes.
    score_s: float = 0.0
    #: Differences between scores up to this are noise.
    noise: float = 0.0
    #: Called with every candidate, while the model is still as it was scored.
    on_probe: Callable[[Probe, int], None] = lambda probe, steps: None
    probes: list[Probe] = field(default_factory=list)
    steps: int = 0
    _ends_at: float = 0.0
    _probe_s: float = 0.0

    def run(self, base: float, seconds: float) -> float | None:
        """The factor to train with; None when there was no time to find one out."""
        self._ends_at = self.now() + seconds
        self.prober.begin()
        try:
            self.steps = self._affordable()
            if self.steps < MIN_STEPS:
                return None
            self._climb()
        finally:
            self.prober.restore()
            self.prober.end()
        return choose_rate(self.probes, base, self.lower_is_better, self.noise)

    def _affordable(self) -> int:
        """Steps of each candidate, from the speed of the first few."""
        taken = []
        for place in range(TIMED_STEPS):
            began = self.now()
            self.prober.step(0.0, place)
            taken.append(self.now() - began)
        step = SLOWER * sum(taken[UNUSUAL:]) / len(taken[UNUSUAL:])
        left = self._ends_at - self.now()
        choices = (int((left / count - self.score_s) / max(step, 1e-6)) for count in CANDIDATES)
        steps = next((steps for steps in choices if steps >= MIN_STEPS), 0)
        steps = min(steps, MAX_STEPS)
        self._probe_s, agreed_steps = self.ranks.from_first([steps * step + self.score_s, steps])
        return int(agreed_steps)

    def _climb(self) -> None:
        """Up as long as it helps; if it never did, or the planned rate diverged, down as long as that
        helps."""
        holds = self._probe(1.0)
        if not (holds and self._walk(RUNG)):
            self._walk(1 / RUNG)

    def _walk(self, rung: float) -> bool:
        """Try candidates in one direction; return whether the first was an improvement."""
        helped, factor = False, rung
        lowest, highest = 1 / self.plan.most, min(self.plan.most, self.plan.highest or math.inf)
        while lowest * (1 - BOUND_TOLERANCE) <= factor <= highest * (1 + BOUND_TOLERANCE) and self._room():
            if not self._probe(factor):
                break
            helped, factor = True, factor * rung
        return helped

    def _room(self) -> bool:
        return bool(self.ranks.from_first([self.now() + self._probe_s <= self._ends_at])[0])

    def _probe(self, factor: float) -> bool:
        """Train and score; whether this is the best so far, within the noise."""
        self.prober.restore()
        score = self.score() if self._trained(factor) else None
        if score is not None and not math.isfinite(score):
            score = None
        probe = Probe(factor, score, None if score is None else self.rewarded())
        self.probes.append(probe)
        self.on_probe(probe, self.steps)
        if score is None:
            return False
        *others, own = gains_of(self.probes, 0.0, self.lower_is_better).values()
        return own - max(others, default=-math.inf) > -self.noise

    def _trained(self, factor: float) -> bool:
        """Train a candidate; False as soon as its loss diverges."""
        first = None
        for place in range(self.steps):
            loss = self.ranks.from_first(
                [self.prober.step(factor * probe_rate_factor(place, self.steps), place)]
            )[0]
            first = loss if first is None else first
            if not math.isfinite(loss) or (first > FLOOR and loss > DIVERGED * first):
                return False
        return True


def probe_rate_factor(place: int, steps: int) -> float:
    """The factor of a probe's step on its candidate's rate."""
    warmup = max(round(WARMUP * steps), 1)
    if place < warmup:
        return (place + 1) / warmup
    return 1 - (place - warmup) / max(steps - warmup, 1)


def gains_of(probes: Sequence[Probe], base: float, lower_is_better: bool) -> dict[float, float]:
    """The gain over the base of each candidate that did not diverge, by factor, in the order of trial.
    Rewards in one field of all: against the base alone a small one that has grown leaves no room to tell."""
    rewarded = {probe.factor: probe.rewarded for probe in probes if probe.rewarded is not None}
    if rewarded:
        return dict(zip(rewarded, rewarded_gains(list(rewarded.values())), strict=True))
    sign = 1.0 if lower_is_better else -1.0
    return {probe.factor: sign * (base - probe.score) for probe in probes if probe.score is not None}


def choose_rate(
    probes: Sequence[Probe], base: float, lower_is_better: bool, noise: float = 0.0
) -> float | None:
    """The highest rate of those that are nearly as good as the best; the lowest where none is good."""
    gains = gains_of(probes, base, lower_is_better)
    if not gains:
        return min((probe.factor for probe in probes), default=None)
    best = max(gains.values())
    if best <= 0 and not noise:
        # Nothing beats the base in so few steps: the planned rate, or what is left of it where it diverged.
        return 1.0 if 1.0 in gains else min(gains)
    least = (1 - NEARLY) * best if best > 0 else best
    return max(factor for factor, gain in gains.items() if gain >= least - noise)
