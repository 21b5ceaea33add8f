"""Layers with an adapter: what plans count, what PEFT takes, and what is done about the rest."""

from __future__ import annotations

from collections import Counter
from typing import Any

import peft
import pytest
import torch

from core.models.identify import facts_from_config
from core.models.shapes import linear_shapes
from tests.trainer import odd_models
from trainer.inputs.adapter_targets import keep_what_loads, linear_names

pytestmark = pytest.mark.small

POOL = ("lfm2", "falcon_h1", "granite", "minicpm5", "kanana", "nanbeige")


@pytest.mark.parametrize("kind", POOL)
def test_a_plan_counts_the_models_own_layers_and_those_that_get_an_adapter(kind: str) -> None:
    model = odd_models.KINDS[kind]()
    facts = facts_from_config(model.config.to_dict(), "org/model")
    linear = Counter(
        (name.rpartition(".")[2], module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head")
    )
    planned = Counter[tuple[str, int, int]]()
    for shape in linear_shapes(facts):
        planned[shape.name, shape.d_in, shape.d_out] += shape.copies
    assert planned == linear
    assert facts.params_total == pytest.approx(sum(weight.numel() for weight in model.parameters()), rel=0.02)
    assert targets(model, "all-linear") == {shape.name for shape in linear_shapes(facts)} - facts.no_adapter


@pytest.mark.parametrize(
    ("kind", "asked", "adapted"),
    [
        ("falcon_h1", ["q_proj", "out_proj"], {"q_proj"}),
        ("falcon_h1", ["out_proj"], {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj"} | {"gate_proj"}),
        ("lfm2", ["gate_proj", "up_proj"], {"w1", "w2", "w3", "in_proj", "out_proj"} | {"q_proj"}),
        ("lfm2", ["q_proj", "gate_proj"], {"q_proj"}),
        ("granite", ["q_proj"], {"q_proj"}),
        ("mixture", ["gate_up_proj"], set()),
    ],
)
def test_what_peft_refuses_costs_its_layers_and_never_the_training(
    kind: str, asked: list[str], adapted: set[str]
) -> None:
    model = odd_models.KINDS[kind]()
    assert targets(model, asked) >= adapted
    assert all(weight.requires_grad for weight in model.parameters())  # trying has changed nothing


def test_memory_that_runs_out_while_a_layer_is_tried_is_not_the_layers_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(peft, "inject_adapter_in_model", full)
    with pytest.raises(torch.OutOfMemoryError):
        targets(odd_models.KINDS["tied"](), ["q_proj"])


def targets(model: Any, asked: list[str] | str) -> set[str]:
    """The names of the layers that have an adapter in the end."""
    before = [weight.requires_grad for weight in model.parameters()]
    config = peft.LoraConfig(r=2, target_modules=asked, task_type="CAUSAL_LM")
    keep_what_loads(model, config)
    assert [weight.requires_grad for weight in model.parameters()] == before
    if config.target_modules == {"gate_up_proj"}:
        return set()
    copy = type(model)(model.config)
    with_adapter = peft.get_peft_model(copy, config)
    layers = (name for name, part in with_adapter.named_modules() if hasattr(part, "lora_A"))
    return {name.rpartition(".")[2] for name in layers}


LLAMAS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.mark.parametrize(
    ("kind", "layers"), [("gpt2", ["c_attn", "c_fc", "c_proj"]), ("tied", LLAMAS), ("fewer_rows", LLAMAS)]
)
def test_lora_is_for_all_linear_layers_but_the_head(kind: str, layers: list[str]) -> None:
    """Of GPT-2 Axolotl finds none, and the run ends before it began."""
    assert linear_names(odd_models.KINDS[kind]()) == layers


def test_of_a_model_that_also_sees_only_what_reads_text_gets_lora() -> None:
    """Eyes and language model have layers of the same names."""
    model = odd_models.seeing()
    names = linear_names(model)
    assert len(names) == 2 * 7
    assert all("language_model" in name for name in names)
    modules = dict(model.named_modules())
    assert all(isinstance(modules[name], torch.nn.Linear) for name in names)


def test_if_peft_refuses_all_of_them_it_says_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = odd_models.KINDS["tied"]()
    config = peft.LoraConfig(r=2, target_modules="all-linear")
    monkeypatch.setattr(peft, "inject_adapter_in_model", refusing)
    keep_what_loads(model, config)
    assert config.target_modules == "all-linear"
    assert linear_names(model)


def refusing(*_: object) -> None:
    raise ValueError("not this one")
