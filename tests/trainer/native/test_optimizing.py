"""Optimizers by the plan's names."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from core.choices import Optimizer, Schedule
from core.plan_parts import AdapterPlan, OptimizerPlan
from tests.trainer.native import tiny
from trainer.native import optimizing
from trainer.native.optimizing import Masters, NoOptimizer


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 16, dtype=dtype), nn.LayerNorm(16, dtype=dtype), nn.Linear(16, 8, dtype=dtype)
    )


def named(name: Optimizer, **changes: object) -> OptimizerPlan:
    return OptimizerPlan(name=name, learning_rate=1e-2, schedule=Schedule.CONSTANT, **changes)


def trained(net: nn.Module, masters: Masters, steps: int = 20) -> list[float]:
    given, wanted = torch.randn(64, 32), torch.zeros(64, 8)
    dtype = next(net.parameters()).dtype
    losses = []
    for _ in range(steps):
        loss = (net(given.to(dtype)).float() - wanted).square().mean()
        loss.backward()
        masters.set_rate(1e-2)
        masters.step()
        masters.zero_grad()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(
    "name",
    [Optimizer.ADAMW_TORCH, Optimizer.ADAMW_TORCH_FUSED, Optimizer.ADAFACTOR, Optimizer.MUON],
)
def test_every_optimizer_lets_a_loss_fall_and_goes_on_from_its_state(name: Optimizer) -> None:
    net, plan = model(), tiny.plan(full=True, optimizer=named(name))
    masters = optimizing.build(net, plan, tiny.CPU)
    losses = trained(net, masters)
    assert losses[-1] < 0.9 * losses[0]
    other = model()
    other.load_state_dict(net.state_dict())
    again = optimizing.build(other, plan, tiny.CPU)
    again.take_up(deepcopy(masters.state()))
    torch.manual_seed(1)
    first = trained(net, masters, 3)
    torch.manual_seed(1)
    assert trained(other, again, 3) == first


def test_a_change_too_small_for_bf16_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred steps of a two-thousandth of the weight."""
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    masters = Masters([("w", weight)], lambda found: torch.optim.SGD([one for _, one in found], lr=5e-4))
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        masters.step()
    assert float(weight[0]) == pytest.approx(0.95, abs=0.004)


def test_norms_are_not_decayed_and_loras_b_learns_faster_where_asked() -> None:
    net = model()
    plan = tiny.plan(full=True, optimizer=named(Optimizer.ADAMW_TORCH_FUSED, weight_decay=0.1))
    groups = optimizing.build(net, plan, tiny.CPU).optimizer.param_groups
    assert {(group["weight_decay"], weight.ndim) for group in groups for weight in group["params"]} == {
        (0.1, 2),
        (0.0, 1),
    }

    class Dressed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lora_A, self.lora_B = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    adapter = AdapterPlan(rank=2, alpha=4, dropout=0, params=1, loraplus_lr_ratio=16.0)
    masters = optimizing.build(Dressed(), tiny.plan(adapter=adapter), tiny.CPU)
    masters.set_rate(1e-3)
    assert sorted(group["lr"] for group in masters.optimizer.param_groups) == pytest.approx([1e-3, 1.6e-2])


def test_an_optimizer_of_the_image_engines_is_refused() -> None:
    with pytest.raises(NoOptimizer, match="prodigy"):
        optimizing.build(model(), tiny.plan(full=True, optimizer=named(Optimizer.PRODIGY)), tiny.CPU)
