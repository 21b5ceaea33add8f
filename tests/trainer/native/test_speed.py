"""What makes steps faster, and how it stands back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from core.domain.choices import CompileMode
from core.planning.plan import BatchPlan, PrecisionPlan, SequencePlan
from tests.trainer.native import tiny
from trainer.native import model as nets
from trainer.native import speed
from trainer.native.batches import BatchLayout

pytestmark = pytest.mark.small


def test_fp8_stands_back_with_a_reason_where_it_would_gain_nothing() -> None:
    notes: list[tuple[str, str]] = []
    for changes, why in (({}, "LoRA"), ({"full": True}, "no fp8 units")):
        plan = tiny.plan(precision=PrecisionPlan(fp8=True), **changes)
        speed.convert_to_fp8(nn.Linear(8, 8), plan, lambda kind, text: notes.append((kind, text)))
        kind, text = notes.pop()
        assert (kind, why in text) == ("fp8", True)


def test_layers_are_compiled_one_by_one_and_one_that_cannot_be_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tiny.plan(precision=PrecisionPlan(bf16=False, compile_mode=CompileMode.DEFAULT))
    model, attention = nets.load_model(tiny.model_folder(tmp_path / "model"), plan, tiny.CPU)
    net, asked = nets.LossModel(model, attention), []

    def compiled(self: nn.Module, **how: object) -> None:
        asked.append((type(self).__name__, how))

    monkeypatch.setattr(nn.Module, "compile", compiled)
    notes: list[str] = []
    speed.compile_layers(net, plan, lambda kind, text: notes.append(text))
    assert asked == [("LlamaDecoderLayer", {"dynamic": True})] * 2
    assert "2 layers" in notes[0]
    assert torch._dynamo.config.suppress_errors


@pytest.mark.parametrize(
    ("packing", "checkpointing", "mode"),
    [
        (True, False, "max-autotune"),
        (True, True, "max-autotune-no-cudagraphs"),
        (False, False, "max-autotune-no-cudagraphs"),
    ],
)
def test_cuda_graphs_are_for_fixed_shapes_only(packing: bool, checkpointing: bool, mode: str) -> None:
    precision = PrecisionPlan(compile_mode=CompileMode.MAX_AUTOTUNE, gradient_checkpointing=checkpointing)
    sequence = SequencePlan(length=32, packing=packing, per_epoch=1, tokens_per_epoch=1)
    plan = tiny.plan(precision=precision, sequence=sequence)
    assert speed._without_graphs(CompileMode.MAX_AUTOTUNE, plan) == mode


@pytest.mark.parametrize(("most", "wanted"), [(4, (4, 8)), (8, (8, 4)), (100, (32, 1)), (1, (4, 8))])
def test_the_batch_grows_as_far_as_it_fits_and_the_step_stays(most: int, wanted: tuple[int, int]) -> None:
    plan = tiny.plan(batch=BatchPlan(micro=4, accumulation=8, world_size=1))
    batch = speed.larger_micro(plan, lambda micro: micro <= most).batch
    assert (batch.micro, batch.accumulation) == wanted
    assert batch.effective == plan.batch.effective


def test_a_batch_is_not_grown_beyond_what_gets_faster() -> None:
    sequence = SequencePlan(length=4096, per_epoch=1, tokens_per_epoch=1)
    plan = tiny.plan(sequence=sequence, batch=BatchPlan(micro=1, accumulation=64, world_size=1))
    assert speed.larger_micro(plan, lambda micro: True).batch.micro * 4096 == speed.ENOUGH_TOKENS


@pytest.mark.parametrize("pairs", [False, True])
def test_the_batch_that_is_tried_is_the_largest_that_can_come(tmp_path: Path, pairs: bool) -> None:
    plan = tiny.plan(full=True)
    model, attention = nets.load_model(tiny.model_folder(tmp_path / "model"), plan, tiny.CPU)
    net = nets.DpoLossModel(model, attention, 0.1) if pairs else nets.LossModel(model, attention)
    batch = speed._longest_batch(3, 16, BatchLayout(by_row=not pairs, pairs=pairs))
    assert batch.ids.shape == (6 if pairs else 3, 16)
    net(batch).sum().backward()
    assert all(weight.grad is not None for weight in net.parameters())
