"""The held-out judge: how many rows it can afford, and that it always reads the same ones."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer import judges as module
from trainer.callbacks.ranks import OneRank
from trainer.judges import FEWEST, HeldOutJudge
from trainer.scoring.held_out import Measured


class Held:
    """So many rows, each with its number as its loss, and each as slow as the test says."""

    def __init__(self, rows: int, row_s: float) -> None:
        self.rows, self.row_s = list(range(rows)), row_s
        self.base: Any = None
        self.read: list[list[int]] = []

    def score(self, model: Any, *, rank: int, world: int, reference: Any = None) -> Measured:
        mine = self.rows[rank::world]
        self.read.append(mine)
        time.sleep(self.row_s * len(mine))
        sums = (float(sum(mine)), float(len(mine)))
        return Measured("eval_loss", lower_is_better=True, sums=sums, formula=lambda of: of[0] / of[1])

    def remember_base(self, model: Any, *, rank: int, world: int) -> Measured:
        return self.score(model, rank=rank, world=world)

    def rewarded(self, measured: Measured) -> None:
        """These are losses."""


class Ranks(OneRank):
    """One of two; what the other brings is the same."""

    rank, world = 1, 2

    def gather(self, values: Any) -> list[float]:
        return [*values, *values]


def judge_of(monkeypatch: pytest.MonkeyPatch, held: Held, ranks: Any) -> HeldOutJudge:
    monkeypatch.setattr(module.HeldOut, "open", lambda *arguments, **named: held)
    monkeypatch.setattr(module, "files_of", lambda prepared: None)
    accelerator = SimpleNamespace(unwrap_model=lambda model, keep_torch_compile: model)
    trainer = SimpleNamespace(
        processing_class=None, accelerator=accelerator, model=torch.nn.Linear(1, 1), is_fsdp_enabled=False
    )
    sheet = SimpleNamespace(run=SimpleNamespace(task_type=None, model_path=""), prepared=None)
    return HeldOutJudge(sheet, trainer, ranks)  # type: ignore[arg-type]


def test_rows_that_are_cheap_are_all_read(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(200, 0.0)
    judge = judge_of(monkeypatch, held, OneRank())
    assert judge.begin(10.0, untouched=True) == sum(range(200)) / 200
    assert held.read[-1] == held.rows
    judge.judge()
    assert held.read[-1] == held.rows


def test_of_rows_that_are_dear_as_many_are_read_as_the_budget_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(200, 0.005)
    judge = judge_of(monkeypatch, held, OneRank())
    judge.begin(0.25, untouched=True)
    assert FEWEST <= len(held.read[-1]) <= 50
    judge.judge()
    assert held.read[-1] == held.read[-2]


def test_a_few_rows_are_read_whatever_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(100, 0.01)
    judge_of(monkeypatch, held, OneRank()).begin(0.0, untouched=True)
    assert all(rows == held.read[0] for rows in held.read)
    assert len(held.read[0]) >= FEWEST - 1


def test_several_ranks_read_different_rows_and_merge_what_they_found(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(100, 0.0)
    judge = judge_of(monkeypatch, held, Ranks())
    value = judge.begin(10.0, untouched=True)
    assert held.read[-1] == held.rows[1::2]
    assert value == sum(held.rows[1::2]) / 50
