"""What Axolotl would do to a model, and does not here."""

from __future__ import annotations

import torch

from tests.trainer import odd_models
from trainer.axolotl_patches import freeze_senses, linear_names


def test_lora_on_all_linear_layers_finds_those_of_gpt2() -> None:
    """Axolotl finds none, and the run ends before it began."""
    assert linear_names(odd_models.gpt2()) == ["c_attn", "c_fc", "c_proj"]


def test_the_head_is_no_layer_for_lora_tied_or_not() -> None:
    expected = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert linear_names(odd_models.tied()) == expected
    assert linear_names(odd_models.fewer_rows()) == expected


def test_of_a_model_that_also_sees_only_what_reads_text_gets_lora() -> None:
    """Eyes and language model have layers of the same names."""
    model = odd_models.seeing()
    names = linear_names(model)
    assert len(names) == 2 * 7
    assert all("language_model" in name for name in names)
    modules = dict(model.named_modules())
    assert all(isinstance(modules[name], torch.nn.Linear) for name in names)


def test_what_text_never_reaches_is_not_trained() -> None:
    """Several processes would wait for gradients that never come."""
    model = odd_models.seeing()
    assert freeze_senses(model) > 0
    ids = torch.arange(8)[None]
    model.train()
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    assert [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None] == []
    assert not any(one.requires_grad for name, one in model.named_parameters() if "vision" in name)


def test_of_a_model_that_only_reads_everything_is_trained() -> None:
    model = odd_models.mixture()
    assert freeze_senses(model) == 0
    assert all(one.requires_grad for one in model.parameters())
