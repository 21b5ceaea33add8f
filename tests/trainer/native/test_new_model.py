"""Models of our own size."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from trainer.native import new_model

pytestmark = pytest.mark.small


@pytest.mark.parametrize("params", [1_000_000, 30_000_000, 125_000_000, 1_000_000_000, 8_000_000_000])
def test_a_shape_has_about_as_many_parameters_as_asked(params: int) -> None:
    shape = new_model.shape_of(params, 32_000, 2048)
    width, layers, vocabulary = (shape[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
    # A table of 32,000 tokens alone has more than the smallest.
    least = vocabulary * 64
    assert new_model._count_parameters(width, layers, vocabulary) == pytest.approx(
        max(params, least), rel=0.2
    )
    assert shape["num_attention_heads"] % shape["num_key_value_heads"] == 0


def test_what_is_counted_is_what_transformers_makes(tmp_path: Path) -> None:
    new_model.make_model(tmp_path, 400_000, 512, 64)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    config = model.config
    counted = new_model._count_parameters(config.hidden_size, config.num_hidden_layers, 512)
    assert sum(weight.numel() for weight in model.parameters()) == counted
