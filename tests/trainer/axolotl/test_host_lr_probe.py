"""Steps that leave no trace: what follows is to the last digit what would have been without them."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainer.axolotl.host import HfProber
from trainer.session import undo
from trainer.session.ranks import Communicator
from trainer.session.undo import Snapshots

BATCHES, ACCUMULATION = 6, 2


class Loader(list[Any]):
    """As accelerate prepares one: "the active one" until it is told to be over."""

    ended = 0

    def end(self) -> None:
        self.ended += 1


class Trainer:
    """What of a Hugging Face trainer the prober touches; dropout makes the random numbers count."""

    def __init__(self, optimizer: str) -> None:
        torch.manual_seed(1)
        # Above 4,096 numbers bitsandbytes keeps its states in 8 bits.
        self.model_wrapped = nn.Sequential(nn.Linear(96, 64), nn.Dropout(0.5), nn.Linear(64, 1))
        trained = list(self.model_wrapped.parameters())
        self.optimizer = _optimizer(optimizer, trained)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 0.5)
        self.loader = Loader(torch.randn(4, 96) for _ in range(BATCHES))
        self.callback_handler = SimpleNamespace(train_dataloader=self.loader)
        self.args = SimpleNamespace(
            gradient_accumulation_steps=ACCUMULATION, device=torch.device("cpu"), max_grad_norm=1.0
        )
        state = SimpleNamespace(_set_sync_gradients=lambda last: self.synced.append(last))
        self.accelerator = SimpleNamespace(gradient_state=state, no_sync=lambda model: torch.enable_grad())
        self.synced: list[bool] = []
        self.seen: list[float] = []
        self._metrics = {"train": {"loss": [1.0]}}

    def get_batch_samples(self, rows: Any, count: int, device: Any) -> tuple[list[Any], int]:
        batch = [row for _, row in zip(range(count), rows, strict=False)]
        return [{"x": row} for row in batch], len(batch)

    def training_step(self, model: Any, inputs: Any, count: int) -> torch.Tensor:
        rows = inputs.pop("x")
        self.seen.append(float(rows.sum()))
        loss = (model(rows) - 1).pow(2).mean() / count
        loss.backward()
        return loss.detach()

    def _clip_grad_norm(self, model: Any) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def trained(self, steps: int) -> torch.Tensor:
        """The training that would have been."""
        for at in range(steps):
            rows = self.loader[ACCUMULATION * at : ACCUMULATION * (at + 1)]
            for batch in rows:
                self.training_step(self.model_wrapped, {"x": batch}, ACCUMULATION)
            self._clip_grad_norm(self.model_wrapped)
            self.optimizer.step()
            self.model_wrapped.zero_grad()
        return torch.cat([one.detach().flatten() for one in self.model_wrapped.parameters()])


def _optimizer(name: str, trained: list[Any]) -> Any:
    if name == "adamw":
        return torch.optim.AdamW(trained, lr=0.01)
    bitsandbytes = pytest.importorskip("bitsandbytes")
    return getattr(bitsandbytes.optim, name)(trained, lr=0.01)


def prober_of(trainer: Trainer) -> HfProber:
    named = dict(trainer.model_wrapped.named_parameters())
    return HfProber(trainer, Snapshots(named, Path(__file__).parent / "nowhere", Communicator()))


@pytest.mark.parametrize("optimizer", ["adamw", "AdamW8bit", "Lion8bit"])
def test_after_all_probes_the_training_is_the_one_that_would_have_been(optimizer: str) -> None:
    expected = Trainer(optimizer).trained(3)
    trainer = Trainer(optimizer)
    prober = prober_of(trainer)
    prober.begin()
    before = torch.get_rng_state(), random.getstate()
    for factor in (1.0, 100.0):
        prober.restore()
        for place in range(3):
            prober.step(factor, place)
    moved = torch.cat([one.detach().flatten() for one in trainer.model_wrapped.parameters()])
    assert not torch.allclose(moved, expected, atol=1e-3)
    prober.restore()
    prober.end()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert torch.equal(trainer.trained(3), expected)


def test_every_candidate_sees_the_same_rows_and_few_rows_come_again() -> None:
    trainer = Trainer("adamw")
    prober = prober_of(trainer)
    prober.begin()
    for _ in range(2):
        prober.restore()
        for place in range(5):  # there are three steps' worth
            prober.step(1.0, place)
    half = len(trainer.seen) // 2
    assert trainer.seen[:half] == trainer.seen[half:]
    assert trainer.seen[:6] + trainer.seen[:4] == trainer.seen[:half]
    assert trainer.synced == [False, True] * 10
    prober.end()
    assert trainer.loader.ended == 1


def test_a_candidates_rate_is_its_factor_on_the_peak_of_each_group() -> None:
    trainer = Trainer("adamw")
    prober = prober_of(trainer)
    prober.begin()
    prober.step(3.0, 0)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.03)
    prober.restore()
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
    assert trainer._metrics == {"train": {}}


def test_without_rows_for_a_single_step_it_fails() -> None:
    trainer = Trainer("adamw")
    trainer.loader.clear()
    prober = prober_of(trainer)
    prober.begin()
    with pytest.raises(ValueError, match="not rows enough"):
        prober.step(1.0, 0)


def test_a_sampler_with_a_generator_of_its_own_begins_where_it_would_have() -> None:
    trainer = Trainer("adamw")
    order = torch.Generator().manual_seed(7)
    trainer.loader.batch_sampler = SimpleNamespace(sampler=SimpleNamespace(generator=order))  # type: ignore[attr-defined]
    before = order.get_state()
    prober = prober_of(trainer)
    prober.begin()
    torch.randperm(10, generator=order)
    prober.end()
    assert torch.equal(order.get_state(), before)


def test_where_there_is_no_room_for_a_copy_of_the_weights_nothing_is_probed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(undo, "free_memory", lambda: 0)
    monkeypatch.setattr(Snapshots, "_disk_free", lambda self: 0)
    assert prober_of(Trainer("adamw")).begin() is False
