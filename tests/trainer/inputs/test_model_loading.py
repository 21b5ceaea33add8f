"""What a base model's folder may not decide, and what is done where a kernel is missing."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig, BloomForCausalLM

from core.domain.choices import Attention
from tests.trainer import tiny
from trainer.axolotl.patches import fall_back_to_slower_attention
from trainer.inputs.model_loading import forbid_remote_code, with_attention, without_remote_code

EVIL = "evil/kernels"


@pytest.fixture
def bloom(tmp_path: Path) -> Path:
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def test_what_names_code_is_taken_out_of_a_configuration_at_every_level() -> None:
    said = {
        "model_type": "llama",
        "auto_map": {"AutoConfig": f"{EVIL}--config.Config"},
        "_attn_implementation": EVIL,
        "text_config": {"attn_implementation": EVIL, "rope_theta": 1.0, "parts": [{"kernel_config": EVIL}]},
        "quantization_config": {"quant_method": "fp8", "backend": EVIL, "modules_to_not_convert": ["a/b"]},
        "_name_or_path": "org/name",
    }
    assert without_remote_code(said) == {
        "model_type": "llama",
        "text_config": {"rope_theta": 1.0, "parts": [{}]},
        "quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["a/b"]},
        "_name_or_path": "org/name",
    }


def test_a_kernel_of_the_hub_in_a_models_folder_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = importlib.import_module("transformers.modeling_utils")
    asked: list[Any] = []
    monkeypatch.setattr(hub, "lazy_import_flash_attention", lambda *given, **_: asked.append(given))
    path = tiny.save(tmp_path) / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "_attn_implementation": EVIL, "auto_map": {"AutoConfig": EVIL}}))
    forbid_remote_code()
    forbid_remote_code()
    assert getattr(AutoConfig.from_pretrained(tmp_path), "auto_map", None) is None
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
    assert not asked


def test_a_kernel_that_a_model_lacks_is_replaced_by_the_next_slower_one(bloom: Path) -> None:
    def load(attention: Attention) -> Any:
        return AutoModelForCausalLM.from_pretrained(bloom, attn_implementation=attention.value)

    for wanted in (Attention.FLASH_3, Attention.FLASH_2, Attention.FLEX, Attention.SDPA, Attention.EAGER):
        model, used = with_attention(load, wanted)
        assert (used, model.config._attn_implementation) == (Attention.EAGER, "eager")


def test_what_has_nothing_to_do_with_attention_is_no_reason_to_try_another(bloom: Path) -> None:
    tries = []

    def broken(attention: Attention) -> None:
        tries.append(attention)
        raise ValueError("size mismatch for lm_head.weight")

    with pytest.raises(ValueError, match="size mismatch"):
        with_attention(broken, Attention.FLASH_2)
    assert tries == [Attention.FLASH_2]


def test_axolotl_loads_a_model_without_the_planned_kernel(
    bloom: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = importlib.import_module("axolotl.loaders.model").ModelLoader
    monkeypatch.setattr(loader, "_load_model_from_pretrained", loader._load_model_from_pretrained)
    fall_back_to_slower_attention()
    planned = "flash_attention_2"
    its: Any = SimpleNamespace(
        cfg=SimpleNamespace(trust_remote_code=False, attn_implementation=planned),
        model_kwargs={"attn_implementation": planned},
        model_config=AutoConfig.from_pretrained(bloom),
        auto_model_loader=AutoModelForCausalLM,
        base_model=str(bloom),
    )
    assert loader._load_model_from_pretrained(its).config._attn_implementation == "eager"
    assert its.cfg.attn_implementation == "eager"
