"""The model, dressed for training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from core.models.identify import facts_from_config
from core.planning.candidate import shape_of
from core.planning.plan import AdapterPlan, PrecisionPlan
from tests.trainer import tiny as small
from tests.trainer.native import tiny
from trainer.errors import BadModel
from trainer.native import model
from trainer.native import model as nets
from trainer.native.batches import BatchLayout, TokenBatch, collate
from trainer.native.lora import add_adapters

pytestmark = pytest.mark.small


def test_only_rows_that_share_a_sequence_carry_positions(tmp_path: Path) -> None:
    rows = tiny.rows(tmp_path / "rows", 4)
    single = collate(rows, ((0,), (1,)), BatchLayout())
    shared = collate(rows, ((0, 1), (2,)), BatchLayout(packed=True, length=64))
    assert single.positions is None
    lengths = [int(length) for length in rows.lengths[:2]]
    assert shared.positions is not None
    assert shared.positions[0, : sum(lengths)].tolist() == [*range(lengths[0]), *range(lengths[1])]


def batch(folder: Path) -> TokenBatch:
    rows = tiny.rows(folder / "rows", 4)
    return collate(rows, ((0,), (1,), (2,), (3,)), BatchLayout(by_row=True))


def gradients(folder: Path, full: bool, **settings: Any) -> tuple[dict[str, torch.Tensor], list[bool]]:
    """Of one pass, and which layers compute their activations again."""
    torch.manual_seed(0)
    checkpointing = settings.pop("checkpointing", True)
    precision = PrecisionPlan(bf16=False, tf32=False, gradient_checkpointing=checkpointing)
    plan = tiny.plan(full=full, precision=precision, engine_config=settings)
    model, attention = nets.load_model(folder / "model", plan, tiny.CPU)
    nets.LossModel(model, attention)(batch(folder)).sum().backward()
    flags = [layer.gradient_checkpointing for layer in nets.without_adapters(model).model.layers]
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    return found, flags


@pytest.mark.parametrize("full", [True, False])
def test_whatever_is_computed_again_the_gradients_stay(tmp_path: Path, full: bool) -> None:
    tiny.model_folder(tmp_path / "model", num_hidden_layers=3)
    kept, flags = gradients(tmp_path, full, checkpointing=False)
    assert flags == [False, False, False]
    for settings, wanted in (
        ({"recompute": "layers"}, [True, True, True]),
        ({"recompute": "layers", "recompute_every": 2}, [True, False, True]),
        ({"recompute": "cheap"}, [True, True, True]),
    ):
        again, flags = gradients(tmp_path, full, **settings)
        assert flags == wanted
        for name, gradient in kept.items():
            torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-7)


def test_cheap_recomputation_multiplies_no_matrix_twice(tmp_path: Path) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    tiny.model_folder(tmp_path / "model")
    rows = batch(tmp_path)
    spent = {}
    for name, checkpointing, recompute in (
        ("none", False, "layers"),
        ("layers", True, "layers"),
        ("cheap", True, "cheap"),
    ):
        precision = PrecisionPlan(bf16=False, tf32=False, gradient_checkpointing=checkpointing)
        plan = tiny.plan(full=True, precision=precision, engine_config={"recompute": recompute})
        model, attention = nets.load_model(tmp_path / "model", plan, tiny.CPU)
        with FlopCounterMode(display=False) as counter:
            nets.LossModel(model, attention)(rows).sum().backward()
        spent[name] = counter.get_total_flops()
    assert spent["none"] == spent["cheap"] < spent["layers"]


def test_the_frozen_part_below_the_first_adapter_has_no_backward_pass(tmp_path: Path) -> None:
    tiny.model_folder(tmp_path / "model")
    model, attention = nets.load_model(tmp_path / "model", tiny.plan(), tiny.CPU)
    reached = []
    model.get_input_embeddings().register_forward_hook(lambda *parts: reached.append(parts[2].requires_grad))
    nets.LossModel(model, attention)(batch(tmp_path)).sum().backward()
    assert reached == [False]
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)


def test_a_head_that_is_more_than_a_matrix_is_refused(tmp_path: Path) -> None:
    from transformers import PhiConfig, PhiForCausalLM

    config = PhiConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    PhiForCausalLM(config).save_pretrained(tmp_path / "model")
    with pytest.raises(BadModel, match="a bias"):
        nets.load_model(tmp_path / "model", tiny.plan(), tiny.CPU)


def test_a_folder_that_is_no_model_is_the_models_fault(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadModel, match="cannot be loaded"):
        nets.load_model(tmp_path, tiny.plan(), tiny.CPU)


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_chunks_give_the_loss_and_gradients_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, cap: float | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(37, 8, dtype=dtype), torch.randn(50, 8, dtype=dtype)
    targets, weight = torch.randint(50, (37,)), torch.rand(37)

    def gradients(kept: int) -> list[torch.Tensor]:
        monkeypatch.setattr(model, "KEPT_BYTES", kept)
        monkeypatch.setattr(model, "CHUNK_BYTES", 4 * 50 * 10)
        inputs = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
        losses = model.token_losses(*inputs, targets, cap)
        (losses * weight).sum().backward()
        return [losses.detach(), *(one.grad for one in inputs)]

    for chunked, plain in zip(gradients(0), gradients(1 << 30), strict=True):
        torch.testing.assert_close(chunked, plain, rtol=1e-4, atol=1e-5)


def test_a_frozen_head_costs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "KEPT_BYTES", 0)
    hidden, head = torch.randn(4, 8, requires_grad=True), torch.randn(50, 8)
    model.token_losses(hidden, head, torch.arange(4)).sum().backward()
    assert hidden.grad is not None
    assert head.grad is None


def test_preferences_are_the_papers() -> None:
    losses = model.preference_losses(torch.tensor([1.0]), torch.tensor([0.5]), beta=0.1)
    torch.testing.assert_close(losses, -F.logsigmoid(torch.tensor([0.1 * (1.0 - 0.5)])))


def test_layers_with_other_ranks_are_as_many_parameters_as_the_planner_counts() -> None:
    whole = small.model()
    facts = facts_from_config(whole.config.to_dict(), "tiny")
    pattern = {"down_proj": 8, "layers[.]0[.].*": 2}
    adapter = AdapterPlan(rank=4, alpha=8, dropout=0.0, params=1, rank_pattern=pattern)
    adapted = add_adapters(whole, tiny.plan(adapter=adapter))
    trained = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    factors = tuple((text, rank / 4) for text, rank in pattern.items())
    assert trained == 4 * shape_of(facts, (), factors).adapted.params_per_rank
