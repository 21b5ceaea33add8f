"""The held-out scorer: how many rows it can afford, and that it always reads the same ones."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.domain.tasks import TaskType
from tests.trainer import tiny
from tests.trainer.forks import ForkServer
from tests.trainer.sharding import together
from trainer.axolotl import plugin as module
from trainer.axolotl.plugin import MIN_ROWS, HeldOutScorer, frozen_base
from trainer.scoring.held_out import HeldOutSums
from trainer.session.ranks import Communicator


class Held:
    """So many rows, each with its number as its loss, and each as slow as the test says, by its own clock."""

    def __init__(self, rows: int, row_s: float) -> None:
        self.rows, self.row_s, self.now = list(range(rows)), row_s, 0.0
        self.base: Any = None
        self.read: list[list[int]] = []

    def score(self, model: Any, *, rank: int, world: int, reference: Any = None) -> HeldOutSums:
        mine = self.rows[rank::world]
        self.read.append(mine)
        self.now += self.row_s * len(mine)
        sums = (float(sum(mine)), float(len(mine)))
        return HeldOutSums("eval_loss", lower_is_better=True, sums=sums, formula=lambda of: of[0] / of[1])

    def remember_base(self, model: Any, *, rank: int, world: int) -> HeldOutSums:
        return self.score(model, rank=rank, world=world)

    def rewarded(self, measured: HeldOutSums) -> None:
        """These are losses."""


class Ranks(Communicator):
    """One of two; what the other brings is the same."""

    def __init__(self) -> None:
        super().__init__(rank=1, world=2)

    def from_first(self, values: Any) -> list[float]:
        return list(values)

    def gather(self, values: Any) -> list[float]:
        return [*values, *values]


def scorer_of(
    monkeypatch: pytest.MonkeyPatch, held: Held, ranks: Any, model: torch.nn.Module | None = None
) -> HeldOutScorer:
    monkeypatch.setattr(module.HeldOut, "open", lambda *arguments, **named: held)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: held.now))
    accelerator = SimpleNamespace(unwrap_model=lambda model, keep_torch_compile: model)
    trainer = SimpleNamespace(
        processing_class=None,
        accelerator=accelerator,
        model=model or torch.nn.Linear(1, 1),
        is_fsdp_enabled=False,
    )
    spec = SimpleNamespace(run=SimpleNamespace(task_type=TaskType.INSTRUCT, model_path=""), prepared=None)
    return HeldOutScorer(spec, trainer, ranks)  # type: ignore[arg-type]


def test_rows_that_are_cheap_are_all_read(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(200, 0.0)
    scorer = scorer_of(monkeypatch, held, Communicator())
    assert scorer.score_base(10.0, untouched=True) == sum(range(200)) / 200
    assert held.read[-1] == held.rows
    scorer.score()
    assert held.read[-1] == held.rows


def test_of_rows_that_are_dear_as_many_are_read_as_the_budget_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(200, 0.005)
    scorer = scorer_of(monkeypatch, held, Communicator())
    scorer.score_base(0.25, untouched=True)
    assert len(held.read[-1]) == 50
    scorer.score()
    assert held.read[-1] == held.read[-2]


def test_a_few_rows_are_read_whatever_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(100, 0.01)
    scorer_of(monkeypatch, held, Communicator()).score_base(0.0, untouched=True)
    assert all(rows == held.read[0] for rows in held.read)
    assert len(held.read[0]) >= MIN_ROWS - 1


def test_several_ranks_read_different_rows_and_merge_what_they_found(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(100, 0.0)
    scorer = scorer_of(monkeypatch, held, Ranks())
    value = scorer.score_base(10.0, untouched=True)
    assert held.read[-1] == held.rows[1::2]
    assert value == sum(held.rows[1::2]) / 50


def whole_base(rank: int) -> None:
    """As under FSDP, where transformers leaves weights out on all ranks but the first."""
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    like = tiny.load(Path("tiny").absolute())
    base = frozen_base("tiny", like, torch.device("cpu"))
    written = tiny.model()
    for (name, weight), own in zip(base.named_parameters(), written.parameters(), strict=True):
        assert torch.equal(weight, own.to(weight.dtype)), (rank, name)
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
    assert not base.training


def test_every_rank_has_the_whole_base(forks: ForkServer, tmp_path: Path) -> None:
    tiny.save(tmp_path / "tiny")
    assert together(forks, tmp_path, whole_base)
