"""Runs inside the training environment: for each cell the best rate there is, and what the search finds.

    training-python -m benchmarks.rate_search_worker '{"cells": ["chat-qwen-4"], "steps": 300}'

One JSON line per cell and planned rate. The clock is counted, not measured: a step takes a second.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.text_rules.cells import Cell
from benchmarks.text_rules.data import model_of, rows_of
from benchmarks.text_rules.scores import run_spec
from core.domain.choices import LrSchedule, Method, Optimizer
from core.planning.plan import AdapterPlan, LrSearchPlan, OptimizerPlan, TaskSpec, TrainingPlan
from tests.trainer.native.tiny import ALONE, CPU, plan
from trainer.inputs.text import encode_task
from trainer.inputs.tokens import IGNORED, PairRow, load_tokenizer
from trainer.native import model as nets
from trainer.native.batches import BatchLayout, SampleOrder, TokenRows
from trainer.native.evaluation import base_preferences, held_out_loss
from trainer.native.optimizer import Stepper
from trainer.native.prober import NativeProber
from trainer.native.token_file import write_rows
from trainer.native.train import trained_parameters
from trainer.session.learning_rate import ScheduleProgress, rate_factor
from trainer.session.rate_search import LrSearch, is_tuned
from trainer.session.snapshots import Snapshots

BATCH, LENGTH, HELD_OUT, EVALUATIONS = 16, 256, 96, 6
#: Rows of an evaluation's pass.
PASS = 32
#: Seconds of an evaluation, where a step takes one.
EVAL_S = 2.0
SHARE = 0.15
RANK, ALPHA = 32, 64
#: The oracle's rates, and where searches begin: too low for an untouched tiny model, and right for one.
RATES = tuple(1e-3 * 10 ** (third / 3) for third in range(-2, 5))
PLANNED = (RATES[1], RATES[3])


class Lab:
    """One cell: its rows, its base, and trainings at any rate."""

    def __init__(self, folder: Path, cell: Cell, bases: Path) -> None:
        folder.mkdir()
        self.cell, self.folder = cell, folder
        self.base = model_of(cell, folder, bases)
        train, test = rows_of(cell)
        self.train = self._tokens("train", train)
        self.held_out = self._tokens("held-out", test[:HELD_OUT])
        #: By rate: the best score of a whole training.
        self.wholes: dict[float, float] = {}
        self.base_score = self._score(self._stepper(RATES[0]))

    def _tokens(self, name: str, rows: list[dict[str, Any]]) -> TokenRows:
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(rows), encoding="utf-8")
        tokenizer = load_tokenizer(str(self.base))
        spec = run_spec(self.cell, self.base, path, self.folder, 0.0, 0.0)
        encoded = [part for row in encode_task(spec, rows, tokenizer).rows for part in _parts(row)]
        tokens = write_rows(self.folder / name, len(tokenizer), encoded)
        pairs = self.cell.task.has_pairs
        return TokenRows(tokens, BatchLayout(by_row=not pairs, pairs=pairs))

    def _plan(self, rate: float) -> TrainingPlan:
        optimizer = OptimizerPlan(
            name=Optimizer.ADAMW_TORCH, learning_rate=rate, schedule=LrSchedule.LINEAR, warmup_steps=6
        )
        full = self.cell.method is Method.FULL
        adapter = None if full else AdapterPlan(rank=RANK, alpha=ALPHA, dropout=0.0, params=1)
        made = plan(full=full, micro=BATCH, optimizer=optimizer)
        task = TaskSpec(task_type=self.cell.task, hours=1)
        return made.model_copy(update={"adapter": adapter, "task": task})

    def _stepper(self, rate: float) -> Stepper:
        torch.manual_seed(self.cell.seed)
        planned = self._plan(rate)
        model, attention = nets.load_model(self.base, planned, CPU)
        net = nets.LossModel(model, attention)
        if self.cell.task.has_pairs:
            net = nets.DpoLossModel(model, attention, 0.1)
            self.train, self.held_out = (
                rows if rows.reference is not None else self._with_reference(net, rows)
                for rows in (self.train, self.held_out)
            )
        return Stepper(net, planned, ALONE)

    def _with_reference(self, net: nets.DpoLossModel, rows: TokenRows) -> TokenRows:
        return TokenRows(rows.tokens, rows.layout, base_preferences(net, rows, ALONE, PASS))

    def _order(self) -> SampleOrder:
        lengths = self.train.tokens.lengths
        lengths = lengths.reshape(-1, 2).max(axis=1) if self.train.layout.pairs else lengths
        return SampleOrder(lengths, LENGTH, BATCH, 1, 1, seed=self.cell.seed)

    def _score(self, stepper: Stepper) -> float:
        return held_out_loss(stepper.net, self.held_out, ALONE, PASS)

    def whole(self, rate: float, steps: int) -> float:
        """The best of some evaluations of a training at this rate, as a run submits its best."""
        if rate not in self.wholes:
            stepper, best = self._stepper(rate), self.base_score
            schedule = ScheduleProgress(total=steps, asked_warmup=stepper.plan.optimizer.warmup_steps)
            order = self._order().for_rank(0)
            for step in range(1, steps + 1):
                factor = rate_factor(stepper.plan.optimizer, schedule)
                stepper.step(self.train.batches(next(order)), factor)
                schedule.advance()
                if step % (steps // EVALUATIONS) == 0:
                    best = min(best, self._score(stepper))  # a score that is no number is never less
            self.wholes[rate] = best
        return self.wholes[rate]

    def searched(self, rate: float, steps: int) -> dict[str, Any]:
        """What the search makes of a planned rate."""
        stepper, clock = self._stepper(rate), CountedClock()
        states = Snapshots(trained_parameters(stepper.net), self.folder / "states", ALONE)
        prober = CountedProber(clock, stepper, self.train, self._order(), ALONE, states)
        base = self._score(stepper)
        search = LrSearch(
            LrSearchPlan(share=SHARE),
            prober,
            ALONE,
            lambda: clock.seconds,
            score=partial(clock.passing, EVAL_S, lambda: self._score(stepper)),
            lower_is_better=True,
            score_s=EVAL_S,
            tuned=is_tuned(self.cell.task, base),
            pairs=self.cell.task.has_pairs,
            adapter=stepper.plan.adapter is not None,
            whole_steps=lambda step_s: steps,
        )
        factor = search.run(base, SHARE / (1 - SHARE) * steps) or 1.0
        tried = {rate * probe.factor: probe.score for probe in search.probes}
        return {"rate": rate * factor, "steps": search.steps, "tried": tried}


def _parts(row: Any) -> Iterator[tuple[Sequence[int], list[bool]]]:
    """Token sequences, and which of their tokens are learned."""
    if isinstance(row, PairRow):
        for answer in (row.chosen, row.rejected):
            yield [*row.prompt, *answer], [False] * len(row.prompt) + [True] * len(answer)
    else:
        yield row.ids, [label != IGNORED for label in row.labels]


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


def main(asked: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    steps = asked["steps"]
    with tempfile.TemporaryDirectory(prefix="rates-") as made:
        folder = Path(made)
        for name in asked["cells"]:
            lab = Lab(folder / name, Cell.of(name), folder / "bases")
            best = min(RATES, key=lambda rate: lab.whole(rate, steps))
            for planned in PLANNED:
                found = {"oracle": {"rate": best}, "planned": {"rate": planned}}
                found["searched"] = lab.searched(planned, steps)
                for one in found.values():
                    one["score"] = lab.whole(one["rate"], steps)
                line = {"cell": name, "kind": lab.cell.kind, "base": lab.base_score, "found": found}
                line["scores"] = {rate: lab.wholes[rate] for rate in RATES}
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
