"""The winner's search for a rate: a probe during the warm-up, then up to three stages of short trainings."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.text_rules import winner_rules as rules
from benchmarks.text_rules.peer_loop import CpuClock, State, trained_state

if TYPE_CHECKING:
    from benchmarks.text_rules.peer import Peer


class RateSearch:
    def __init__(self, peer: Peer, clock: CpuClock, eval_s: float) -> None:
        self._peer, self._clock, self.eval_s = peer, clock, eval_s
        #: Preferences are judged by the dev rows, everything else by the training loss.
        self._held = peer.task.has_pairs
        self._base: State = trained_state(peer.model)
        self._probe_s = 0.0
        self._until = clock.used + rules.SEARCH_SHARE * clock.seconds
        self._scores: dict[float, float] = {}
        self.notes: list[str] = []

    def run(self) -> float:
        """The rate to train with; the model is as it was."""
        rate = self._search()
        self._peer.set(self._base)
        return rate

    def _search(self) -> float:
        peer = self._peer
        rate = rules.first_rate(peer.task, peer.table, rms_of(peer.model), peer.ask["usual_rms"])
        losses = self._train(rate, rules.WARMUP_PROBE, ramp=rules.WARMUP_PROBE)
        if len(losses) < rules.WARMUP_PROBE:
            return rate
        fall = (losses[0] - sum(losses[-2:]) / 2) / max(losses[0], 1e-9)
        step_s = self._probe_s / rules.WARMUP_PROBE
        self.notes.append(
            f"first rate {rate:.3g} × {rules.probed_factor(fall):.2f}, {1000 * step_s:.0f} ms a step"
        )
        rate *= rules.probed_factor(fall)
        passes = 0.85 * (self._clock.seconds - self._until) / (step_s * peer.per_epoch)
        plan = rules.search_plan(int((self._until - self._clock.used) / step_s), passes)
        return rate if plan is None else self._stages(rate, plan)

    def _stages(self, rate: float, plan: rules.SearchPlan) -> float:
        best = self._best_of(rate, plan.offsets, plan.first)
        if plan.second:
            # Longer trainings: their scores do not compare with the first ones.
            self._scores.clear()
            best = self._best_of(best, rules.STAGE_2, plan.second)
        for _ in range(rules.EXTENSIONS if plan.third else 0):
            candidate = rules.next_rate(self._scores, best)
            if candidate is None or self._clock.used + self._probe_s > self._until:
                break
            best = self._best_of(candidate, (0.0,), plan.second or plan.first)
        return best

    def _best_of(self, rate: float, offsets: tuple[float, ...], steps: int) -> float:
        for offset in offsets:
            candidate = rate * 10**offset
            losses = self._train(candidate, steps, ramp=max(steps // 10, 1))
            score = math.inf
            if len(losses) == steps:
                score = self._peer.score() if self._held else rules.score_of(losses)
            self._scores[candidate] = score
            self.notes.append(f"{candidate:.3g}: {score:.4f} after {steps} steps")
        return rules.pick(self._scores, highest=not self._held)

    def _train(self, rate: float, steps: int, ramp: int) -> list[float]:
        """Losses of a short training from the base; fewer than asked for where it is given up."""
        from benchmarks.text_rules.peer import Steps

        began, losses = self._clock.used, list[float]()
        self._peer.set(self._base)
        training, batches = Steps(self._peer), self._batches()
        best = min(self._scores.values(), default=math.inf) if not self._held else math.inf
        for place in range(steps):
            losses.append(training.step(next(batches), rate * min((place + 1) / ramp, 1.0)))
            if rules.given_up(losses, best):
                return losses[:-1]
        self._probe_s = self._clock.used - began
        return losses

    def _batches(self) -> Iterator[list[Any]]:
        """The same ones for each candidate."""
        chance, order = random.Random("probe"), list(self._peer.rows)
        size = self._peer.batch
        while True:
            chance.shuffle(order)
            for start in range(0, max(len(order) - size, 0) + 1, size):
                yield order[start : start + size]


def rms_of(model: Any) -> float:
    """The median over the matrices of attention and MLP of the weights' root mean square."""
    found = [
        float(weight.detach().pow(2).mean().sqrt())
        for name, weight in model.named_parameters()
        if weight.dim() == 2 and "_proj" in name and "lora_" not in name
    ]
    return sorted(found)[len(found) // 2]
