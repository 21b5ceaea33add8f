"""The learning-rate search: short trainings at several rates, before the real one.

Every candidate trains on the same batches from the same weights, at the planned rate first, then up and down
from there as long as it helps. What decides is the judge's held-out score: a training loss picks the most
destructive rate in preference training. All ranks do the same, rank 0 keeps the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from core.plan_parts import LrSearchPlan
from core.rewarded import Rewarded
from core.rewarded import gains as rewarded_gains
from trainer.callbacks.ranks import Ranks

#: From one candidate to the next: two to a power of ten.
RUNG = math.sqrt(10.0)
#: A bound that a candidate exceeds by so little is meant to include it.
HAIR = 0.02
#: Steps of a candidate at least: fewer tell noise from noise.
FEWEST_STEPS = 6
#: And at most: by then rates have parted, and the time is better spent on training.
MOST_STEPS = 100
#: Candidates that the time is divided among: the planned rate, one on either side, and one more; fewer where
#: each would have too few steps.
CANDIDATES = (4, 3, 2)
#: Steps that are timed beforehand, and how many of them are warm-up.
TIMED_STEPS, UNUSUAL = 3, 1
#: Two steps are a small sample: the others may take longer.
SLOWER = 1.2
#: A probe warms up over this part of it and falls linearly afterwards, as a whole training would.
WARMUP = 0.1
#: A loss this many times that of the first step has diverged; below the floor a loss says nothing of that.
DIVERGED, FLOOR = 2.0, 0.1
#: Candidates that gain nearly as much as the best: the highest rate of them moves furthest in a longer run.
NEARLY = 0.025
#: Rewards of sampled completions differ by so much between models that are equally good.
SAMPLED_NOISE = 0.05


class Prober(Protocol):
    """The engine's hands: steps that leave no trace. All ranks call every method."""

    def begin(self) -> None:
        """Remember the weights."""

    def step(self, factor: float, place: int) -> float:
        """An optimizer step at this factor on the peak rate, on the batch of this place; its loss."""

    def restore(self) -> None:
        """Weights, optimizer and randomness as they were at `begin`."""

    def end(self) -> None:
        """Let go of everything that was remembered."""


class Probe(NamedTuple):
    """One candidate: the factor on the planned rate, and the held-out score; None when it diverged."""

    factor: float
    score: float | None
    #: What the score was made of, where that is more than one number says.
    rewarded: Rewarded | None = None


@dataclass
class Search:
    plan: LrSearchPlan
    prober: Prober
    ranks: Ranks
    now: Callable[[], float]
    #: The held-out score of the model as it is.
    judge: Callable[[], float]
    lower_is_better: bool
    #: What the last score was made of.
    rewarded: Callable[[], Rewarded | None] = lambda: None
    #: Seconds that judging takes.
    judge_s: float = 0.0
    #: Scores that are no further apart say nothing.
    noise: float = 0.0
    #: Told of every candidate, while the model is still as it was judged.
    probed: Callable[[Probe, int], None] = lambda probe, steps: None
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
            if self.steps < FEWEST_STEPS:
                return None
            self._climb()
        finally:
            self.prober.restore()
            self.prober.end()
        return self._chosen(base)

    def _affordable(self) -> int:
        """Steps of each candidate, from the speed of the first few."""
        taken = []
        for place in range(TIMED_STEPS):
            began = self.now()
            self.prober.step(0.0, place)
            taken.append(self.now() - began)
        step = SLOWER * sum(taken[UNUSUAL:]) / len(taken[UNUSUAL:])
        left = self._ends_at - self.now()
        choices = (int((left / count - self.judge_s) / max(step, 1e-6)) for count in CANDIDATES)
        steps = next((one for one in choices if one >= FEWEST_STEPS), 0)
        steps = min(steps, MOST_STEPS)
        self._probe_s, said = self.ranks.from_first([steps * step + self.judge_s, steps])
        return int(said)

    def _climb(self) -> None:
        """Up as long as it helps; if it never did, or the planned rate diverged, down as long as that
        helps."""
        holds = self._probe(1.0)
        if not (holds and self._walk(RUNG)):
            self._walk(1 / RUNG)

    def _walk(self, rung: float) -> bool:
        """Whether the first step in this direction was a better one."""
        helped, factor = False, rung
        least, most = 1 / self.plan.most, min(self.plan.most, self.plan.highest or math.inf)
        while least * (1 - HAIR) <= factor <= most * (1 + HAIR) and self._room():
            if not self._probe(factor):
                break
            helped, factor = True, factor * rung
        return helped

    def _room(self) -> bool:
        return bool(self.ranks.from_first([self.now() + self._probe_s <= self._ends_at])[0])

    def _probe(self, factor: float) -> bool:
        """Train and judge; whether this is the best so far, as far as can be told."""
        self.prober.restore()
        score = self.judge() if self._trained(factor) else None
        if score is not None and not math.isfinite(score):
            score = None
        probe = Probe(factor, score, None if score is None else self.rewarded())
        self.probes.append(probe)
        self.probed(probe, self.steps)
        if score is None:
            return False
        *others, own = gains_of(self.probes, 0.0, self.lower_is_better).values()
        return own - max(others, default=-math.inf) > -self.noise

    def _trained(self, factor: float) -> bool:
        """False as soon as the loss runs away."""
        first = None
        for place in range(self.steps):
            loss = self.ranks.from_first([self.prober.step(factor * shape(place, self.steps), place)])[0]
            first = loss if first is None else first
            if not math.isfinite(loss) or (first > FLOOR and loss > DIVERGED * first):
                return False
        return True

    def _chosen(self, base: float) -> float | None:
        """The highest of those that are nearly as good as the best; the gentlest where none is any good."""
        return choose(self.probes, base, self.lower_is_better, self.noise)


def shape(place: int, steps: int) -> float:
    """The factor of a probe's step on its candidate's rate."""
    warmup = max(round(WARMUP * steps), 1)
    if place < warmup:
        return (place + 1) / warmup
    return 1 - (place - warmup) / max(steps - warmup, 1)


def gains_of(probes: Sequence[Probe], base: float, lower_is_better: bool) -> dict[float, float]:
    """What each of those that did not diverge is better than the base, by factor, in the order of trial.
    Rewards in one field of all: against the base alone a small one that has grown leaves no room to tell."""
    rewarded = {probe.factor: probe.rewarded for probe in probes if probe.rewarded is not None}
    if rewarded:
        return dict(zip(rewarded, rewarded_gains(list(rewarded.values())), strict=True))
    sign = 1.0 if lower_is_better else -1.0
    return {probe.factor: sign * (base - probe.score) for probe in probes if probe.score is not None}


def choose(probes: Sequence[Probe], base: float, lower_is_better: bool, noise: float = 0.0) -> float | None:
    gains = gains_of(probes, base, lower_is_better)
    if not gains:
        return min((probe.factor for probe in probes), default=None)
    best = max(gains.values())
    if best <= 0 and not noise:
        # Nothing beats the base in so few steps: the planned rate, or what is left of it where it diverged.
        return 1.0 if 1.0 in gains else min(gains)
    least = (1 - NEARLY) * best if best > 0 else best
    return max(factor for factor, gain in gains.items() if gain >= least - noise)
