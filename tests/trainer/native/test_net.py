"""The model, dressed for training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.plan_parts import PrecisionPlan
from tests.trainer.native import tiny
from trainer.errors import BadModel
from trainer.native import net as nets
from trainer.native.batches import Batch, Layout, collate


def batch(folder: Path) -> Batch:
    rows = tiny.rows(folder / "rows", 4)
    return collate(rows, ((0,), (1,), (2,), (3,)), Layout(by_row=True))


def gradients(folder: Path, **settings: Any) -> tuple[dict[str, torch.Tensor], list[bool]]:
    """Of one pass, and which layers compute their activations again."""
    checkpointing = settings.pop("checkpointing", True)
    precision = PrecisionPlan(bf16=False, tf32=False, gradient_checkpointing=checkpointing)
    plan = tiny.plan(full=True, precision=precision, engine_config=settings)
    model, attention = nets.load(folder / "model", plan, tiny.CPU)
    nets.Net(model, attention)(batch(folder)).sum().backward()
    flags = [layer.gradient_checkpointing for layer in model.model.layers]
    return {name: weight.grad for name, weight in model.named_parameters()}, flags


def test_whatever_is_computed_again_the_gradients_stay(tmp_path: Path) -> None:
    tiny.model_folder(tmp_path / "model", num_hidden_layers=3)
    kept, flags = gradients(tmp_path, checkpointing=False)
    assert flags == [False, False, False]
    for settings, wanted in (
        ({"recompute": "layers"}, [True, True, True]),
        ({"recompute": "layers", "recompute_every": 2}, [True, False, True]),
        ({"recompute": "cheap"}, [True, True, True]),
    ):
        found, flags = gradients(tmp_path, **settings)
        assert flags == wanted
        for name, gradient in kept.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


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
        model, attention = nets.load(tmp_path / "model", plan, tiny.CPU)
        with FlopCounterMode(display=False) as counter:
            nets.Net(model, attention)(rows).sum().backward()
        spent[name] = counter.get_total_flops()
    assert spent["none"] == spent["cheap"] < spent["layers"]


def test_a_head_that_is_more_than_a_matrix_is_refused(tmp_path: Path) -> None:
    from transformers import CohereConfig, CohereForCausalLM

    config = CohereConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        logit_scale=0.25,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    CohereForCausalLM(config).save_pretrained(tmp_path / "model")
    with pytest.raises(BadModel, match="logit_scale"):
        nets.load(tmp_path / "model", tiny.plan(), tiny.CPU)


def test_a_folder_that_is_no_model_is_the_models_fault(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadModel, match="cannot be loaded"):
        nets.load(tmp_path, tiny.plan(), tiny.CPU)
