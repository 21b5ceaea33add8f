"""Scores of `benchmarks/text_rules.py`, row by row: the validator's metric, as `trainer.scoring` computes it.

A side's record keeps for every row the loss whose mean is the score. For rewards it keeps each function's
mean over the prompt's completions and the KL: what a submission is worth depends on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.text_rules.cells import Cell
from benchmarks.text_rules.data import ERA, World
from core.domain.evaluation import GRPO_GENERATIONS, GRPO_KL_WEIGHT, evaluation_rules, normalised_rewards
from core.domain.tasks import GrpoDataset
from core.runs.run_files import RunSpec
from trainer.inputs.text import read_task
from trainer.inputs.tokens import PromptRow, load_tokenizer, model_window
from trainer.rewards.sandbox import Rewards
from trainer.rewards.source import REWARD_TABLE, write_rewards
from trainer.scoring.eval import _load, compare_models
from trainer.scoring.generation import prompt_kl, sample_completions
from trainer.scoring.held_out import HeldOut


def run_spec(cell: Cell, model: Path, rows: Path, folder: Path, end_by: float, deadline: float) -> RunSpec:
    """A tournament's task: no plan is given."""
    return RunSpec(
        task_id=cell.name,
        task_type=cell.task,
        model_id="org/tiny",
        model_path=str(model),
        data_path=str(rows),
        dataset=World(cell.seed).dataset(cell.task),
        era=ERA,
        kl_coefficient=cell.kl_coefficient,
        work_dir=str(folder),
        submission_dir=str(folder.with_name(f"{folder.name}-model")),
        progress_path=str(folder / "progress.jsonl"),
        result_path=str(folder / "result.json"),
        stop_path=str(folder / "stop"),
        began_at=0.0,
        end_by=end_by,
        deadline_at=deadline,
    )


class CellScores:
    """The held-out rows of a cell, and what a model is on each of them."""

    def __init__(self, cell: Cell, base: Path, rows: Path, folder: Path) -> None:
        self.cell, self.base = cell, base
        folder.mkdir(parents=True, exist_ok=True)
        self.spec = run_spec(cell, base, rows, folder, 0.0, 0.0)
        self.tokenizer = load_tokenizer(str(base))
        self.rows = list(read_task(self.spec, self.tokenizer).rows)
        self.original = _load(base, base)
        self.held = HeldOut(self.spec, self.rows, self.tokenizer)
        if not cell.task.generates:
            self.held.remember_base(self.original)

    def of(self, model: Path | None) -> list[Any]:
        """By row: a loss, or rewards and a KL. None: the base's."""
        loaded = self.original if model is None else _load(model, self.base)
        if self.cell.task.generates:
            return self._prompts(loaded)
        if self.cell.kl_coefficient:
            return self._with_kl(loaded)
        rows = self.held.score(loaded, reference=self.original).rows
        return [round(rows[place], 6) for place in sorted(rows)]

    def _with_kl(self, model: Any) -> list[float]:
        """The KL is a mean over all tokens: each row has its part of it."""
        sums = [
            HeldOut(self.spec, [row], self.tokenizer).score(model, reference=self.original).sums
            for row in self.rows
        ]
        tokens = sum(each[3] for each in sums) / len(sums)
        coefficient = self.cell.kl_coefficient or 0.0
        return [round(loss + coefficient * kl / tokens, 6) for loss, _, kl, _ in sums]

    def _prompts(self, model: Any) -> list[list[float]]:
        prompts = [row for row in self.rows if isinstance(row, PromptRow)]
        with ExitStack() as stack:
            folder = Path(self.spec.work_dir) / "rewards"
            assert isinstance(self.spec.dataset, GrpoDataset)
            write_rewards(self.spec.dataset, folder, era=ERA)
            rewards = Rewards.open(folder / REWARD_TABLE)
            stack.callback(rewards.close)
            window = model_window(str(self.base))
            sampled = sample_completions(
                model,
                prompts,
                self.tokenizer,
                rewards,
                evaluation_rules(ERA),
                reference=self.original,
                window=window,
                together=64,
            )
        values = []
        for place, row in enumerate(prompts):
            own = slice(place * GRPO_GENERATIONS, (place + 1) * GRPO_GENERATIONS)
            means = [sum(numbers[own]) / GRPO_GENERATIONS for numbers in sampled.rewards]
            (kl,) = prompt_kl(model, self.original, [row.prompt], self.tokenizer, window)
            values.append([round(each, 6) for each in (*means, kl)])
        return values


def losses_of(cell: Cell, sides: Sequence[list[Any]]) -> list[list[float]]:
    """Rows of several sides as losses whose means are their scores in one field; of rewards, with the other
    sign."""
    if not cell.task.generates:
        return [list(rows) for rows in sides]
    weights = [reward.reward_weight for reward in _rewards(cell)]
    raw = [[sum(row[at] for row in rows) / len(rows) for at in range(len(weights))] for rows in sides]
    normal = normalised_rewards(raw)
    found = []
    for rows, means, shares in zip(sides, raw, normal, strict=True):
        factors = [share / mean if mean else 0.0 for mean, share in zip(means, shares, strict=True)]
        found.append(
            [
                GRPO_KL_WEIGHT * row[-1]
                - sum(
                    weight * factor * value
                    for weight, factor, value in zip(weights, factors, row, strict=False)
                )
                for row in rows
            ]
        )
    return found


def _rewards(cell: Cell) -> Sequence[Any]:
    dataset = World(cell.seed).dataset(cell.task)
    assert isinstance(dataset, GrpoDataset)
    return dataset.reward_functions


def compared(cell: Cell, champions: Sequence[list[Any]], challengers: Sequence[list[Any]]) -> dict[str, Any]:
    """Each training of one side with each of the other's, row by row as in a boss round; rewards, too.

    A chance of 0.9 takes more than many rows: hardly a training of the one may lose to one of the other."""
    found = [
        compare_models(*losses_of(cell, [champion, challenger]))
        for champion in champions
        for challenger in challengers
    ]
    return {
        "p_better": fmean(each.p_better for each in found),
        "mean_gap": fmean(each.mean_gap for each in found),
        "chances": [each.p_better for each in found],
    }
