"""Optimizers by the plan's names."""

from __future__ import annotations

from copy import deepcopy
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

from core.domain.choices import LrSchedule, Optimizer
from core.planning.plan import OptimizerPlan
from core.profile.targets import Targets
from tests.trainer.native import tiny
from trainer.native import model as nets
from trainer.native import optimizer
from trainer.native.batches import IGNORED, BatchLayout, SampleOrder, TokenRows
from trainer.native.loader import BatchLoader
from trainer.native.optimizer import MasterWeights, NoOptimizer, Stepper

pytestmark = pytest.mark.small


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 16, dtype=dtype), nn.LayerNorm(16, dtype=dtype), nn.Linear(16, 8, dtype=dtype)
    )


def named(name: Optimizer, **changes: object) -> OptimizerPlan:
    return OptimizerPlan(name=name, learning_rate=1e-2, schedule=LrSchedule.CONSTANT, **changes)


def trained(net: nn.Module, masters: MasterWeights, steps: int = 20) -> list[float]:
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
    "name", [Optimizer.ADAMW_TORCH, Optimizer.ADAMW_TORCH_FUSED, Optimizer.ADAFACTOR, Optimizer.MUON]
)
def test_every_optimizer_lowers_a_loss_and_resumes_from_its_state(name: Optimizer) -> None:
    net, plan = model(), tiny.plan(full=True, optimizer=named(name))
    masters = optimizer.build_optimizer(net, plan, tiny.CPU)
    losses = trained(net, masters)
    assert losses[-1] < losses[0]
    other = model()
    other.load_state_dict(net.state_dict())
    again = optimizer.build_optimizer(other, plan, tiny.CPU)
    again.load_state(deepcopy(masters.state()))
    torch.manual_seed(1)
    first = trained(net, masters, 3)
    torch.manual_seed(1)
    assert trained(other, again, 3) == first


def test_a_change_too_small_for_bf16_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred steps of a two-thousandth of the weight."""
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    masters = MasterWeights(
        [("w", weight)], lambda weights: torch.optim.SGD([one for _, one in weights], lr=5e-4)
    )
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        masters.step()
    assert float(weight[0]) == pytest.approx(0.95, abs=0.004)


def test_norms_are_not_decayed_and_loras_b_learns_faster_where_asked() -> None:
    net = model()
    plan = tiny.plan(full=True, optimizer=named(Optimizer.ADAMW_TORCH_FUSED, weight_decay=0.1))
    groups = optimizer.build_optimizer(net, plan, tiny.CPU).param_groups
    assert {(group["weight_decay"], weight.ndim) for group in groups for weight in group["params"]} == {
        (0.1, 2),
        (0.0, 1),
    }

    class Dressed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lora_A, self.lora_B = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    plan = tiny.plan(targets=Targets(loraplus_lr_ratio=16.0))
    masters = optimizer.build_optimizer(Dressed(), plan, tiny.CPU)
    masters.set_rate(1e-3)
    assert sorted(group["lr"] for group in masters.param_groups) == pytest.approx([1e-3, 1.6e-2])


def test_an_optimizer_of_the_image_engines_is_refused() -> None:
    with pytest.raises(NoOptimizer, match="prodigy"):
        optimizer.build_optimizer(model(), tiny.plan(full=True, optimizer=named(Optimizer.PRODIGY)), tiny.CPU)


@pytest.mark.parametrize("packing", [False, True])
def test_steps_are_those_of_a_plain_training_with_transformers(tmp_path: Path, packing: bool) -> None:
    """The same batches through the model's own forward pass, row by row where rows share a sequence."""
    plan = tiny.plan(full=True, steps=10, micro=4, accumulation=2)
    model, attention = nets.load_model(tiny.model_folder(tmp_path / "model"), plan, tiny.CPU)
    stepper = Stepper(nets.LossModel(model, attention), plan, tiny.ALONE)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).train()
    planned = plan.optimizer
    how = {
        "lr": planned.learning_rate,
        "betas": (plan.targets.adam_beta1, plan.targets.adam_beta2),
        "weight_decay": 0.0,
    }
    optimizer = torch.optim.AdamW(plain.parameters(), **how)
    file = tiny.rows(tmp_path / "rows")
    order = SampleOrder(file.lengths, 32, 4, 2, 1, packing=packing)
    loader = BatchLoader(TokenRows(file, BatchLayout(packed=packing)), order)
    try:
        for batches, micros in islice(zip(loader, order.for_rank(0), strict=False), 10):
            count = sum(batch.count for batch in batches)
            summed = torch.zeros(())
            for index in (row for micro in micros for sequence in micro for row in sequence):
                ids, trained = torch.from_numpy(file[index].ids.astype("int64")), file[index].trained
                targets = torch.where(torch.from_numpy(trained.copy()), ids, IGNORED)[1:]
                logits = plain(input_ids=ids[None]).logits[0, :-1]
                summed = summed + F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
            (summed / count).backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), planned.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            step = stepper.step(batches)
            assert step.loss == pytest.approx(float(summed / count), rel=1e-4)
            assert step.norm == pytest.approx(float(norm), rel=1e-3)
    finally:
        loader.close()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=2e-4, msg=name)


@pytest.mark.parametrize("full", [True, False])
def test_gradients_are_scaled_to_the_largest_norm_and_left_alone_below_it(tmp_path: Path, full: bool) -> None:
    plan = tiny.plan(full=full)
    model, attention = nets.load_model(tiny.model_folder(tmp_path / "model"), plan, tiny.CPU)
    stepper = Stepper(nets.LossModel(model, attention), plan, tiny.ALONE)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    for length, wanted in ((0.5, 0.5), (4.0, 1.0)):
        for weight in weights:
            weight.grad = torch.full_like(weight, length / sum(one.numel() for one in weights) ** 0.5)
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        written = [gradient._version for gradient in gradients]
        assert stepper._clipped() == pytest.approx(length, rel=1e-4)
        assert float(torch.nn.utils.get_total_norm(gradients)) == pytest.approx(wanted, rel=1e-4)
        assert (written == [gradient._version for gradient in gradients]) == (wanted == length)


def test_the_rate_is_the_plans_times_the_factor(tmp_path: Path) -> None:
    plan = tiny.plan(full=True)
    model, attention = nets.load_model(tiny.model_folder(tmp_path / "model"), plan, tiny.CPU)
    stepper = Stepper(nets.LossModel(model, attention), plan, tiny.ALONE)
    file = tiny.rows(tmp_path / "rows")
    loader = BatchLoader(TokenRows(file, BatchLayout(by_row=True)), SampleOrder(file.lengths, 32, 4, 1, 1))
    before = [weight.detach().clone() for weight in model.parameters()]
    step = stepper.step(next(iter(loader)), 0.0)
    loader.close()
    assert step.rate == 0.0
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
