"""The learning rate: its schedule, its reaction to a plateau, and the search for its peak.

The number of steps is a forecast that the clock keeps correcting, so the schedule spreads what is left of
the way over the steps that are left: a new forecast bends the curve and never makes it jump.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, Protocol

from core.domain.choices import LrSchedule
from core.domain.evaluation import RewardScore
from core.domain.evaluation import gains_over_base as rewarded_gains
from core.domain.tasks import TaskType
from core.planning.plan import LrSearchPlan, OptimizerPlan, PlateauPlan, TrainingPlan
from core.system.files import write_atomically
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


#: From one candidate to the next: two to a power of ten; then nearer to the best.
RUNG = math.sqrt(10.0)
FINER = (10**0.25, 10**0.125)
#: A candidate may exceed a bound by this much: the bound is meant to include it.
BOUND_TOLERANCE = 0.02
#: Steps of a candidate at least: fewer only show noise.
MIN_STEPS = 6
#: And at most: by then the rates differ clearly, and the time is better spent on training.
MAX_STEPS = 100
#: Candidates that the time is divided among: three around the best and two finer ones; fewer where each would
#: have too few steps.
CANDIDATES = (5, 4, 3, 2)
#: Steps that are timed beforehand, and how many of them are warm-up.
TIMED_STEPS, UNUSUAL = 3, 1
#: Two steps are a small sample: the others may take longer.
SLOWER = 1.2
#: A probe warms up over this part of it and falls linearly afterwards, as a whole training would.
WARMUP = 0.1
#: A loss this many times that of the first step has diverged; below the floor a loss is no evidence.
DIVERGED, FLOOR = 2.0, 0.1
#: A candidate whose losses after half of its steps are this many times the best one's, on the same batches,
#: is given up.
HOPELESS = 1.5
#: Rewards: a candidate gains nearly as much as the best within this share. The highest rate of those moves
#: furthest in a longer run.
NEARLY = 0.025
#: Rewards of sampled completions differ by this much between equally good models.
SAMPLED_NOISE = 0.05
#: Of the base's score: candidates that gain less say nothing, and what a rate loses up to this is repaired in
#: a longer training.
LITTLE, HARMLESS = 0.02, 0.04
#: Decades that the best rate falls for every decade that a training is longer: 0.0 to 0.35 in an earlier
#: benchmark; 0.3 is published for pretraining. With 0.15, full trainings 33 and 45 times as long as their
#: candidates lost to a fifth of the rate. Too low costs less than too high.
SHORTER = 0.3
#: Added for adapters, which begin at zero and hardly move in a few steps, and for preferences. The best rate
#: of 6 steps was 2 to 4 times that of 300 for texts in full, 3 to 9 times for preferences in full, and 8 to
#: 10 times for preferences by adapter.
ADAPTER_SHORTER, PAIRS_SHORTER = 0.15, 0.1
#: Measured up to 50 times; beyond this it is not extrapolated.
MOST_LONGER = 100.0
#: Parts of the base's loss that the best candidate takes off: up to the first one the model is tuned already,
#: and a longer training wants the candidates' own rate (1.5 and 3 times the planned one in the table of text
#: rules, where a third of that was taken); from the second on it is untouched.
TUNED_GAIN, UNTOUCHED_GAIN = 0.15, 0.4
#: A masked loss below this (nats per token) is hardly an untouched model's: those begin at 1.2 and more, and
#: only tasks whose answers follow from their prompts end lower. The search then begins at this part of the
#: planned rate: in an earlier benchmark a model wanted half of the rate it was trained with, a fully trained
#: one a tenth. It walks on from there either way, so for a task that is merely easy it costs one more
#: candidate.
TUNED_LOSS, TUNED_FIRST = 0.7, 0.2


def is_tuned(task_type: TaskType, base: float) -> bool:
    """Return True if so low a score shows that the base was already trained for the task. A loss on
    preferences shows nothing: it begins at ln 2 with any model."""
    return task_type.is_supervised and base < TUNED_LOSS


class Prober(Protocol):
    """Training steps that are undone afterwards. All ranks call every method."""

    def begin(self) -> bool:
        """Remember the weights; whether there is room for that. Without it nothing else is called."""

    def step(self, factor: float, place: int) -> float:
        """An optimizer step at this factor on the peak rate, on the batch of this place; its loss."""

    def restore(self) -> None:
        """Weights, optimizer and randomness as they were at `begin`."""

    def end(self) -> None:
        """Free everything that was remembered."""


class Probe(NamedTuple):
    """One candidate: the factor on the planned rate, and the held-out score; None when it diverged or was
    given up."""

    factor: float
    score: float | None
    #: What the score is made of, where one number is not enough.
    rewarded: RewardScore | None = None


@dataclass
class LrSearch:
    """The search for the learning rate: short trainings at other rates, which are undone.

    Coarse steps up or down from the first candidate as long as they help, then finer ones around the best.
    All are scored on held-out rows, by the validator's metric. `choose_rate` says which rate they suggest.

    A short training says more about its own rate than about a long one's, and how depends on the model
    (`benchmarks/rate_search.txt`). One that has much to learn wants a little less in a longer training. One
    that is tuned already, or knows the task well, shows nothing in a few steps but the disturbance that each
    rate makes and a longer training repairs: the best of such candidates would be the lowest.
    """

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
    #: Differences between scores up to this are noise; 0: scores of the same rows, which have next to none.
    noise: float = 0.0
    #: Whether the base knows the task already (`is_tuned`).
    tuned: bool = False
    #: Whether the rows are preferences.
    pairs: bool = False
    #: Whether an adapter is trained.
    adapter: bool = False
    #: Steps of the training that follows, by the seconds that one takes.
    whole_steps: Callable[[float], float] = lambda step_s: 1.0
    #: Called with every candidate, while the model is still as it was scored.
    on_probe: Callable[[Probe, int], None] = lambda probe, steps: None
    probes: list[Probe] = field(default_factory=list)
    steps: int = 0
    #: How many times as long the training is.
    longer: float = 1.0
    _ends_at: float = 0.0
    _probe_s: float = 0.0
    #: By step, of the best candidate so far.
    _losses: list[float] = field(default_factory=list)

    def run(self, base: float, seconds: float) -> float | None:
        """The factor to train with; None when there was no time to find one out, or no room."""
        self._ends_at = self.now() + seconds
        if not self.prober.begin():
            return None
        try:
            self.steps = self._affordable()
            if self.steps < MIN_STEPS:
                return None
            self._walk_from(self._first, base)
            self._refine(base)
        finally:
            self.prober.restore()
            self.prober.end()
        chosen = choose_rate(self.probes, base, self.lower_is_better, self.noise, self._lowered, self.pairs)
        return None if chosen is None else min(max(chosen, self._lowest), self._highest)

    @property
    def _first(self) -> float:
        """The factor of the first candidate. For preferences: what a few steps need where the planned rate is
        right for the whole training."""
        if self.tuned:
            return TUNED_FIRST
        return (self.plan.first or 1.0) * (self._lowered if self.pairs else 1.0)

    @property
    def _lowered(self) -> float:
        return lowered_by(self.longer, self.pairs, self.adapter)

    @property
    def _highest_tried(self) -> float:
        """The highest factor of a candidate. It may exceed the bounds of the result by as much as a longer
        training lowers the rate: a few steps, which are undone, harm nothing."""
        if self.noise or self.tuned:
            return self._highest
        return self._highest * self._lowered

    @property
    def _lowest(self) -> float:
        return 1 / self.plan.most

    @property
    def _highest(self) -> float:
        return min(self.plan.most, self.plan.highest or math.inf)

    def _affordable(self) -> int:
        """Steps of each candidate, from the speed of the first few."""
        taken = []
        for place in range(TIMED_STEPS):
            began = self.now()
            self.prober.step(0.0, place)
            taken.append(self.now() - began)
        step_s = SLOWER * sum(taken[UNUSUAL:]) / len(taken[UNUSUAL:])
        left = self._ends_at - self.now()
        choices = (int((left / count - self.score_s) / max(step_s, 1e-6)) for count in CANDIDATES)
        steps = min(next((steps for steps in choices if steps >= MIN_STEPS), 0), MAX_STEPS)
        longer = max(self.whole_steps(step_s) / max(steps, 1), 1.0)
        self._probe_s, agreed_steps, self.longer = self.ranks.from_first(
            [steps * step_s + self.score_s, steps, longer]
        )
        return int(agreed_steps)

    def _walk_from(self, first: float, base: float) -> None:
        """In one direction as long as it helps, or if it never did in the other: first up, unless the first
        candidate diverged or leaves a worse model than the base."""
        first = min(max(first, self._lowest), self._highest_tried)
        holds = self._probe(first)
        gain = gains_of(self.probes, base, self.lower_is_better).get(first, -math.inf)
        down = not holds or (gain < 0 and not self.noise)
        if not self._walk(first, 1 / RUNG if down else RUNG, base) and holds:
            self._walk(first, RUNG if down else 1 / RUNG, base)

    def _walk(self, first: float, rung: float, base: float) -> bool:
        """Try candidates in one direction; return whether the first was an improvement."""
        helped, factor = False, first * rung
        while self._allowed(factor):
            if self._probe(factor):
                helped = True
                if rung < 1 and self._says_little(base):
                    break
            elif rung > 1 or any(probe.score is not None for probe in self.probes):
                break
            factor *= rung  # on downwards as long as all diverge
        return helped

    def _says_little(self, base: float) -> bool:
        """Going down, the rates no longer hurt, nor do they bring anything in so few steps."""
        gain = gains_of(self.probes, base, self.lower_is_better).get(self.probes[-1].factor)
        return gain is not None and -HARMLESS * abs(base) <= gain < LITTLE * abs(base)

    def _refine(self, base: float) -> None:
        """Nearer to the best candidate, on the side of its better neighbour first."""
        if self.noise:
            return
        for rung in FINER:
            gains = gains_of(self.probes, base, self.lower_is_better)
            if max(gains.values(), default=0.0) < LITTLE * abs(base):
                return
            for factor in _around(gains, rung):
                if self._allowed(factor):
                    self._probe(factor)

    def _allowed(self, factor: float) -> bool:
        lowest, highest = self._lowest * (1 - BOUND_TOLERANCE), self._highest_tried * (1 + BOUND_TOLERANCE)
        within = lowest <= factor <= highest
        return within and bool(self.ranks.from_first([self.now() + self._probe_s <= self._ends_at])[0])

    def _probe(self, factor: float) -> bool:
        """Train and score; whether this is the best so far, within the noise."""
        self.prober.restore()
        losses = self._trained(factor)
        score = None if losses is None else self.score()
        if score is not None and not math.isfinite(score):
            score = None
        probe = Probe(factor, score, None if score is None else self.rewarded())
        self.probes.append(probe)
        self.on_probe(probe, self.steps)
        if score is None or losses is None:
            return False
        *others, own = gains_of(self.probes, 0.0, self.lower_is_better).values()
        if own > max(others, default=-math.inf):
            self._losses = losses
        return own - max(others, default=-math.inf) > -self.noise

    def _trained(self, factor: float) -> list[float] | None:
        """Train a candidate; return its losses, or None as soon as it diverges or is hopeless."""
        losses: list[float] = []
        for place in range(self.steps):
            loss = self.ranks.from_first(
                [self.prober.step(factor * probe_rate_factor(place, self.steps), place)]
            )[0]
            losses.append(loss)
            if not math.isfinite(loss) or (losses[0] > FLOOR and loss > DIVERGED * losses[0]):
                return None
            if len(losses) == self.steps // 2 and self._hopeless(losses):
                return None
        return losses

    def _hopeless(self, losses: list[float]) -> bool:
        if not self._losses:
            return False
        second = slice(len(losses) // 2, len(losses))
        own, best = fmean(losses[second]), fmean(self._losses[second])
        return best > FLOOR and own > HOPELESS * best


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


def _around(gains: dict[float, float], rung: float) -> Iterator[float]:
    best = max(gains, key=gains.__getitem__)
    lower, higher = _neighbours(gains, best)
    down_first = gains.get(lower, -math.inf) > gains.get(higher, -math.inf)
    yield from (best / rung, best * rung) if down_first else (best * rung, best / rung)


def _neighbours(gains: dict[float, float], factor: float) -> tuple[float, float]:
    """Return the next lower and the next higher candidate, or NaN."""
    lower = max((other for other in gains if other < factor), default=math.nan)
    return lower, min((other for other in gains if other > factor), default=math.nan)


def choose_rate(
    probes: Sequence[Probe],
    base: float,
    lower_is_better: bool,
    noise: float = 0.0,
    lowered: float = 1.0,
    pairs: bool = False,
) -> float | None:
    """Return the factor that the candidates suggest for the whole training, whose best rate is lower than
    theirs by up to `lowered` (of `lowered_by`). Return None if there are no candidates."""
    gains = gains_of(probes, base, lower_is_better)
    if not gains:
        # All diverged. Those of preferences begin far above the planned rate and say nothing about it.
        return min([1.0, *(probe.factor for probe in probes)]) if probes else None
    best = max(gains.values())
    if noise:
        least = (1 - NEARLY) * best if best > 0 else best
        return max(factor for factor, gain in gains.items() if gain >= least - noise)
    if best < LITTLE * abs(base):
        harmless = _highest_harmless(gains, HARMLESS * abs(base))
        # Three times the planned rate was the best of those tried there (0.54 and 0.62 against 0.63 at the
        # planned), and ten times lost.
        return min(harmless / lowered, RUNG) if pairs else harmless
    peak = _peak(gains)
    if pairs or len(probes) == 1:  # a planned rate that nothing speaks against
        return peak / lowered if pairs else peak
    untouched = 1.0
    if base:
        untouched = (best / abs(base) - TUNED_GAIN) / (UNTOUCHED_GAIN - TUNED_GAIN)
    return float(peak * lowered ** -min(max(untouched, 0.0), 1.0))


def lowered_by(longer: float, pairs: bool, adapter: bool) -> float:
    """Return the ratio of a candidate's best rate to that of a training `longer` times as long."""
    return float(min(longer, MOST_LONGER) ** (SHORTER + ADAPTER_SHORTER * adapter + PAIRS_SHORTER * pairs))


def _highest_harmless(gains: dict[float, float], most: float) -> float:
    """The highest rate that loses no more than this against the base, between two candidates if need be; the
    lowest one where all lose more."""
    harmless = max((factor for factor, gain in gains.items() if gain >= -most), default=min(gains))
    _, above = _neighbours(gains, harmless)
    if math.isnan(above) or gains[harmless] < -most:
        return harmless
    part = (gains[harmless] + most) / (gains[harmless] - gains[above])
    return float(harmless * (above / harmless) ** part)


def _peak(gains: dict[float, float]) -> float:
    """The top of a parabola, over the rate's logarithm, through the best candidate and its neighbours; at
    most halfway to the nearer one."""
    best = max(gains, key=gains.__getitem__)
    lower, higher = _neighbours(gains, best)
    if math.isnan(lower) or math.isnan(higher):
        return best
    down, up = math.log(best / lower), math.log(higher / best)
    loss_down, loss_up = gains[best] - gains[lower], gains[best] - gains[higher]
    curvature = up * loss_down + down * loss_up
    shift = (up**2 * loss_down - down**2 * loss_up) / (2 * curvature) if curvature > 0 else 0.0
    most = min(down, up) / 2
    return float(best * math.exp(min(max(shift, -most), most)))


@dataclass
class FoundRate:
    """A factor on the planned rate that a search found, in a file for the launches that follow."""

    file: Path

    def factor(self, plan: TrainingPlan) -> float:
        """Return the factor found for such a training, or 0."""
        try:
            record = json.loads(self.file.read_text("utf-8"))
            if record["of"] != self._searched(plan):
                return 0.0
            # Out of memory may have cost some of the batch: noise grows with its root.
            factor = float(record["factor"]) * math.sqrt(plan.batch.effective / float(record["batch"]))
        except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
            return 0.0
        return factor if math.isfinite(factor) and factor > 0 else 0.0

    def remember(self, plan: TrainingPlan, factor: float) -> None:
        record = {"of": self._searched(plan), "batch": plan.batch.effective, "factor": factor}
        write_atomically(self.file, json.dumps(record).encode(), mode=0o644)

    def _searched(self, plan: TrainingPlan) -> list[str]:
        """Identify the trainings that a found rate applies to. After a failure the planned rate is lower and
        the factor stays, so the rate is lower as well."""
        return [plan.task.task_type, plan.method, plan.optimizer.name, plan.model.model_id]
