"""An adapter on routed experts, as it is trained and as it is submitted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from core.models.experts import EXPERT_NAMES, EXPERT_PARAMETERS
from core.models.identify import facts_from_config
from core.planning.candidate import shape_of
from trainer.axolotl.expert_adapters import split_experts

EXPERTS, RANK, OTHER_RANK = 4, 2, 6
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "num_local_experts": EXPERTS,
    "pad_token_id": 0,
}
MORE: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 24, "head_dim": 8},
    "olmoe": {"num_experts": EXPERTS},
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def saved(folder: Path, kind: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **SHAPE, **MORE[kind]))
    model.save_pretrained(folder)
    return model.config


def score(model: Any) -> float:
    torch.manual_seed(1)
    ids = torch.randint(1, 64, (3, 9))
    with torch.no_grad():
        return float(model.eval()(input_ids=ids, labels=ids).loss)


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def adapted(folder: Path) -> Any:
    """As Axolotl does it from our configuration."""
    config = LoraConfig(
        r=OTHER_RANK,
        lora_alpha=8,
        target_modules=ATTENTION,
        target_parameters=list(EXPERT_PARAMETERS),
        rank_pattern=dict.fromkeys(EXPERT_PARAMETERS, RANK),
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(2)
    return get_peft_model(loaded(folder), config)


@pytest.mark.parametrize("kind", EXPERT_NAMES)
def test_an_adapter_written_matrix_by_matrix_is_the_one_that_was_trained(kind: str, tmp_path: Path) -> None:
    config = saved(tmp_path / "base", kind)
    model = adapted(tmp_path / "base")
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    before, trained = score(loaded(tmp_path / "base")), score(model)
    assert abs(trained - before) > 1e-4
    split_experts(tmp_path / "adapter", config.model_type)
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert said["target_parameters"] is None
    assert said["rank_pattern"] == dict.fromkeys(ATTENTION, OTHER_RANK)
    again = PeftModel.from_pretrained(loaded(tmp_path / "base"), tmp_path / "adapter")
    assert score(again) == pytest.approx(trained, abs=1e-6)
    assert score(again.merge_and_unload()) == pytest.approx(trained, abs=1e-5)


@pytest.mark.parametrize("kind", EXPERT_NAMES)
def test_its_matrices_have_the_names_and_sizes_of_the_checkpoints(kind: str, tmp_path: Path) -> None:
    """transformers 4 looks for them there."""
    saved(tmp_path / "base", kind)
    adapted(tmp_path / "base").save_pretrained(tmp_path / "adapter")
    split_experts(tmp_path / "adapter", kind)
    weights = load_file(tmp_path / "base" / "model.safetensors")
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    names = {key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in factors}
    assert len(names) == 2 * (len(ATTENTION) + 3 * EXPERTS)
    for name in names:
        first, second = (factors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
        assert (second.shape[0], first.shape[1]) == weights[f"{name}.weight"].shape
        assert first.shape[0] == second.shape[1] == (RANK if "experts" in name else OTHER_RANK)


@pytest.mark.parametrize("kind", EXPERT_NAMES)
def test_the_planner_counts_its_parameters(kind: str, tmp_path: Path) -> None:
    facts = facts_from_config(saved(tmp_path / "base", kind).to_dict())
    model = adapted(tmp_path / "base")
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    shape = shape_of(facts, tuple(ATTENTION), (), RANK / OTHER_RANK)
    assert OTHER_RANK * shape.adapted.params_per_rank == pytest.approx(trained, abs=OTHER_RANK)
    assert shape.expert_params == sum(
        w.numel() for w in loaded(tmp_path / "base").parameters() if w.dim() == 3
    )


def test_other_adapters_are_left_as_they_are(tmp_path: Path) -> None:
    saved(tmp_path / "base", "mixtral")
    plain = LoraConfig(r=2, target_modules=ATTENTION, task_type="CAUSAL_LM")
    get_peft_model(loaded(tmp_path / "base"), plain).save_pretrained(tmp_path / "adapter")
    files = [tmp_path / "adapter" / name for name in ("adapter_config.json", "adapter_model.safetensors")]
    before = [file.read_bytes() for file in files]
    split_experts(tmp_path / "adapter", "mixtral")
    assert [file.read_bytes() for file in files] == before
