"""One optimizer step."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.trainer.native import tiny
from trainer.native import net as nets
from trainer.native.batches import IGNORED, Layout, Loader, Rows
from trainer.native.order import Order
from trainer.native.step import Stepper


@pytest.mark.parametrize("packing", [False, True])
def test_steps_are_those_of_a_plain_training_with_transformers(tmp_path: Path, packing: bool) -> None:
    """The same batches through the model's own forward pass, row by row where rows share a sequence."""
    plan = tiny.plan(full=True, steps=10, micro=4, accumulation=2)
    model, attention = nets.load(tiny.model_folder(tmp_path / "model"), plan, tiny.CPU)
    stepper = Stepper(nets.Net(model, attention), plan, tiny.ALONE)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).train()
    made = plan.optimizer
    how = {
        "lr": made.learning_rate,
        "betas": (made.beta1, made.beta2),
        "eps": made.epsilon,
        "weight_decay": 0.0,
    }
    optimizer = torch.optim.AdamW(plain.parameters(), **how)
    file = tiny.rows(tmp_path / "rows")
    order = Order(file.lengths, 32, 4, 2, 1, packing=packing)
    loader = Loader(Rows(file, Layout(packed=packing)), order)
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
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), made.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            step = stepper.step(batches)
            assert step.loss == pytest.approx(float(summed / count), rel=1e-4)
            assert step.norm == pytest.approx(float(norm), rel=1e-3)
    finally:
        loader.close()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=2e-4, msg=name)


def test_the_rate_is_the_plans_times_the_factor(tmp_path: Path) -> None:
    plan = tiny.plan(full=True)
    model, attention = nets.load(tiny.model_folder(tmp_path / "model"), plan, tiny.CPU)
    stepper = Stepper(nets.Net(model, attention), plan, tiny.ALONE)
    file = tiny.rows(tmp_path / "rows")
    loader = Loader(Rows(file, Layout(by_row=True)), Order(file.lengths, 32, 4, 1, 1))
    before = [weight.detach().clone() for weight in model.parameters()]
    step = stepper.step(next(iter(loader)), 0.0)
    loader.close()
    assert step.rate == 0.0
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
