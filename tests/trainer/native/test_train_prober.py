"""The search for a rate with this engine: its steps leave no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.domain.choices import Attention, LrSchedule, Optimizer
from core.planning.plan import LrSearchPlan, PrecisionPlan, TrainingPlan
from tests.trainer.native import tiny
from trainer.native.train import NativeProber, Trainer, run_loop

pytestmark = pytest.mark.small


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in trainer.setup.net.parameters()]


def prober_of(trainer: Trainer) -> NativeProber:
    assert isinstance(trainer.host.prober, NativeProber)
    return trainer.host.prober


def probed(prober: NativeProber, steps: int = 3) -> list[float]:
    """Losses of the last candidate, which has the planned rate."""
    losses: list[float] = []
    for factor in (30.0, 1.0):
        prober.restore()
        losses = [prober.step(factor, place) for place in range(steps)]
    return losses


def with_optimizer(base: TrainingPlan, **changes: Any) -> TrainingPlan:
    return base.model_copy(update={"optimizer": base.optimizer.model_copy(update=changes)})


FULL = tiny.plan(full=True, steps=6)
BF16 = tiny.plan(full=True, steps=6, precision=PrecisionPlan(bf16=True, tf32=False, attention=Attention.SDPA))


PLANS = {
    "full": FULL,
    "adapter": tiny.plan(steps=6),
    "accumulated": tiny.plan(micro=2, accumulation=2, steps=6),
    "bf16 with masters": with_optimizer(BF16, fp32_master=True),
    "bf16 without": with_optimizer(BF16),
    "Muon": with_optimizer(FULL, name=Optimizer.MUON),
}


@pytest.mark.parametrize("name", PLANS)
def test_after_all_probes_the_training_is_the_one_that_would_have_been(tmp_path: Path, name: str) -> None:
    plan = PLANS[name]
    without = tiny.training(tmp_path, plan, name="without")
    run_loop(without)
    trainer = tiny.training(tmp_path, plan, name="with")
    prober = prober_of(trainer)
    prober.begin()
    probed(prober)
    assert not all(map(torch.equal, weights(trainer), weights(without)))
    prober.restore()
    prober.end()
    run_loop(trainer)
    assert tiny.reported(tmp_path / "with").losses == tiny.reported(tmp_path / "without").losses
    assert all(map(torch.equal, weights(trainer), weights(without)))


def test_a_probes_steps_are_those_that_the_training_begins_with(tmp_path: Path) -> None:
    plan = tiny.plan(full=True, steps=6)
    constant = plan.optimizer.model_copy(update={"schedule": LrSchedule.CONSTANT, "warmup_steps": 0})
    plan = plan.model_copy(update={"optimizer": constant})
    trainer = tiny.training(tmp_path, plan)
    prober = prober_of(trainer)
    prober.begin()
    losses = probed(prober)
    prober.restore()
    prober.end()
    run_loop(trainer)
    assert tiny.reported(tmp_path / "run").losses[:3] == losses


def test_a_training_whose_rate_is_far_too_low_finds_a_better_one(tmp_path: Path) -> None:
    plan = tiny.plan(full=True, steps=12, lr_search=LrSearchPlan(share=0.2))
    low = plan.optimizer.model_copy(update={"learning_rate": 1e-4})
    trainer = tiny.training(tmp_path, plan.model_copy(update={"optimizer": low}))
    outcome = run_loop(trainer)
    assert trainer.session.peak > 3
    assert outcome.steps == 12
    assert outcome.best is not None
    assert outcome.base is not None
    assert outcome.best.value < outcome.base.value
