"""Runs inside the training environment: for each kind of data the best rate there is, and what searches find.

    training-python -m benchmarks.rate_search_worker '{"cases": ["easy"], "steps": 200, "seed": 1}'

One JSON line per case and planned rate. The clock is counted, not measured: a step takes a second.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.training_rows import World, base_model
from core.domain.choices import LrSchedule, Optimizer
from core.domain.tasks import TaskType
from core.planning.plan import AdapterPlan, LrSearchPlan, OptimizerPlan, TaskSpec, TrainingPlan
from tests.trainer import tiny
from tests.trainer.native.tiny import ALONE, CPU, plan
from trainer.native import model as nets
from trainer.native.batches import BatchLayout, SampleOrder, TokenRows
from trainer.native.evaluation import base_preferences, held_out_loss
from trainer.native.optimizer import Stepper
from trainer.native.prober import NativeProber
from trainer.native.token_file import write_rows
from trainer.native.train import trained_parameters
from trainer.session.learning_rate import ScheduleProgress, rate_factor
from trainer.session.rate_search import NEARLY, RUNG, LrSearch, gains_of, is_tuned
from trainer.session.snapshots import Snapshots

BATCH, LENGTH, HELD_OUT, EVALUATIONS = 8, 64, 96, 6
#: Seconds of an evaluation, where a step takes one.
EVAL_S = 2.0
SHARE = 0.15
#: What the base has read before, in steps.
PRETRAIN = 400
#: The oracle's rates, and where searches begin: too low for an untouched tiny model, and right for one.
RATES = tuple(1e-3 * 10 ** (third / 3) for third in range(-2, 5))
PLANNED = (RATES[2], RATES[4])


@dataclass(frozen=True)
class RateCase:
    """A kind of data or model."""

    #: Part of the words in answers that follow no rule.
    noise: float = 0.1
    rows: int = 3000
    #: Steps in which the base has been trained for this task already.
    tuned: int = 0
    #: What is added to the base's matrices at random, in their own standard deviations.
    hurt: float = 0.0
    adapter: bool = False
    pairs: bool = False


CASES = {
    "easy": RateCase(noise=0.05),
    "noisy": RateCase(noise=0.5),
    "few rows": RateCase(rows=300),
    "noised model": RateCase(hurt=0.3),
    "tuned model": RateCase(tuned=300),
    "fully tuned": RateCase(noise=0.3, tuned=2000),
    "LoRA": RateCase(adapter=True),
    "DPO": RateCase(pairs=True),
}


class NoisyWorld(World):
    noise = 0.0

    def answer(self, asked: list[str]) -> str:
        said = [self.replaced[word] for word in asked]
        noisy = [
            self.chance.choice(tiny.WORDS) if self.chance.random() < self.noise else word for word in said
        ]
        return "answer is " + " ".join(noisy)


class Lab:
    """One case: its rows, its base, and trainings at any rate."""

    def __init__(self, folder: Path, case: RateCase, base: Path, seed: int) -> None:
        self.case, self.base, self.seed, self.folder = case, base, seed, folder
        self.world, self.tokenizer = NoisyWorld(seed), tiny.tokenizer(adds_begin=True)
        self.world.noise = case.noise
        if case.tuned:
            self.base = self._tuned_base(folder)
        self.train, self.held_out = (
            self._rows(folder / "train", case.rows),
            self._rows(folder / "held", HELD_OUT),
        )
        #: By rate: the best score of a whole training.
        self.wholes: dict[float, float] = {}
        self.base_score = self._score(self._stepper(RATES[0]))

    def _rows(self, folder: Path, count: int) -> TokenRows:
        encoded = [part for row in self.world.rows(self.task, count) for part in self._encoded(row)]
        tokens = write_rows(folder, len(self.tokenizer), encoded)
        return TokenRows(tokens, BatchLayout(by_row=not self.case.pairs, pairs=self.case.pairs))

    def _encoded(self, row: dict[str, Any]) -> Iterator[tuple[list[int], list[bool]]]:
        asked = self.tokenizer(f"sum of {row.get('prompt') or row['input']} ,")["input_ids"]
        for answer in ("chosen", "rejected") if self.case.pairs else ("output",):
            said = self.tokenizer(row[answer], add_special_tokens=False)["input_ids"]
            said.append(self.tokenizer.eos_token_id)
            yield asked + said, [False] * len(asked) + [True] * len(said)

    def _tuned_base(self, folder: Path) -> Path:
        rows, path = self._rows(folder / "earlier", BATCH * self.case.tuned), folder / "tuned"
        stepper = self._stepper(RATES[3])
        for _ in self._run(stepper, rows, 1.0, self.case.tuned):
            pass
        stepper.net.model.save_pretrained(path)  # type: ignore[operator, union-attr]
        self.tokenizer.save_pretrained(path)
        return path

    def _plan(self, rate: float) -> TrainingPlan:
        optimizer = OptimizerPlan(
            name=Optimizer.ADAMW_TORCH_FUSED, learning_rate=rate, schedule=LrSchedule.LINEAR, warmup_steps=6
        )
        adapter = AdapterPlan(rank=16, alpha=32, dropout=0.0, params=1) if self.case.adapter else None
        made = plan(full=adapter is None, micro=BATCH, optimizer=optimizer)
        return made.model_copy(update={"adapter": adapter, "task": TaskSpec(task_type=self.task, hours=1)})

    @property
    def task(self) -> TaskType:
        return TaskType.DPO if self.case.pairs else TaskType.INSTRUCT

    def _stepper(self, rate: float) -> Stepper:
        torch.manual_seed(self.seed)
        planned = self._plan(rate)
        model, attention = nets.load_model(self.base, planned, CPU)
        if self.case.hurt:
            random = torch.Generator().manual_seed(self.seed)
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    if weight.ndim == 2 and "layers" in name:
                        weight += self.case.hurt * weight.std() * torch.randn(weight.shape, generator=random)
        net = nets.LossModel(model, attention)
        if self.case.pairs:
            net = nets.DpoLossModel(model, attention, 0.1)
            self.train, self.held_out = (
                rows if rows.reference is not None else self._with_reference(net, rows)
                for rows in (self.train, self.held_out)
            )
        return Stepper(net, planned, ALONE)

    def _with_reference(self, net: nets.DpoLossModel, rows: TokenRows) -> TokenRows:
        return TokenRows(rows.tokens, rows.layout, base_preferences(net, rows, ALONE, 32))

    def _order(self, rows: TokenRows) -> SampleOrder:
        lengths = rows.tokens.lengths
        lengths = lengths.reshape(-1, 2).max(axis=1) if rows.layout.pairs else lengths
        return SampleOrder(lengths, LENGTH, BATCH, 1, 1, seed=self.seed)

    def _score(self, stepper: Stepper) -> float:
        return held_out_loss(stepper.net, self.held_out, ALONE, 32)

    def _run(self, stepper: Stepper, rows: TokenRows, factor: float, steps: int) -> Iterator[int]:
        schedule = ScheduleProgress(total=steps, asked_warmup=stepper.plan.optimizer.warmup_steps)
        order = self._order(rows).for_rank(0)
        for step in range(1, steps + 1):
            stepper.step(rows.batches(next(order)), factor * rate_factor(stepper.plan.optimizer, schedule))
            schedule.advance()
            yield step

    def whole(self, rate: float, steps: int) -> float:
        if rate not in self.wholes:
            stepper, best = self._stepper(rate), self.base_score
            for step in self._run(stepper, self.train, 1.0, steps):
                if step % (steps // EVALUATIONS) == 0:
                    best = min(best, self._score(stepper))  # a score that is no number is never less
            self.wholes[rate] = best
        return self.wholes[rate]

    def searched(self, kind: type[LrSearch], rate: float, steps: int) -> dict[str, Any]:
        stepper, clock = self._stepper(rate), CountedClock()
        states = Snapshots(trained_parameters(stepper.net), self.folder / "states", ALONE)
        prober = CountedProber(clock, stepper, self.train, self._order(self.train), ALONE, states)
        base = self._score(stepper)
        search = kind(
            LrSearchPlan(share=SHARE),
            prober,
            ALONE,
            lambda: clock.seconds,
            score=partial(clock.passing, EVAL_S, lambda: self._score(stepper)),
            lower_is_better=True,
            score_s=EVAL_S,
            tuned=is_tuned(self.task, base),
            whole_steps=lambda step_s: steps,
        )
        factor = search.run(base, SHARE / (1 - SHARE) * steps) or 1.0
        return {"rate": rate * factor, "steps": search.steps, "candidates": len(search.probes)}


@dataclass
class CountedClock:
    seconds: float = 0.0

    def passing(self, seconds: float, do: Any) -> Any:
        self.seconds += seconds
        return do()


class CountedProber(NativeProber):
    def __init__(self, clock: CountedClock, *given: Any) -> None:
        super().__init__(*given)
        self._clock = clock

    def step(self, factor: float, place: int) -> float:
        self._clock.seconds += 1.0
        return super().step(factor, place)


class CoarseSearch(LrSearch):
    """The search as it was before: rungs of √10, and of those within 2.5 % of the best the highest."""

    def run(self, base: float, seconds: float) -> float | None:
        super().run(base, seconds)
        gains = gains_of(self.probes, base, self.lower_is_better)
        best = max(gains.values(), default=0.0)
        if best <= 0:
            return 1.0 if 1.0 in gains else min(gains, default=None)
        return max(factor for factor, gain in gains.items() if gain >= (1 - NEARLY) * best)

    def _walk_from(self, first: float, base: float) -> None:
        if not (self._probe(1.0) and self._walk(1.0, RUNG, base)):
            self._walk(1.0, 1 / RUNG, base)

    def _says_little(self, base: float) -> bool:
        return False

    def _refine(self, base: float) -> None:
        """The search as it was before had no finer steps."""

    def _hopeless(self, losses: list[float]) -> bool:
        return False


def main(asked: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    seed, steps = asked["seed"], asked["steps"]
    with tempfile.TemporaryDirectory(prefix="rates-") as folder:
        base = base_model(Path(folder) / "base", NoisyWorld(seed), PRETRAIN, seed)
        for name in asked["cases"]:
            lab = Lab(Path(folder) / name.replace(" ", "-"), CASES[name], base, seed)
            best = min(RATES, key=lambda rate: lab.whole(rate, steps))
            for planned in PLANNED:
                found = {
                    "oracle": {"rate": best},
                    "planned": {"rate": planned},
                    "before": lab.searched(CoarseSearch, planned, steps),
                    "now": lab.searched(LrSearch, planned, steps),
                }
                for one in found.values():
                    one["score"] = lab.whole(one["rate"], steps)
                line = {"case": name, "base": lab.base_score, "planned": planned, "found": found}
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
