"""Kernels give transformers' own numbers where they are planned, and are left out where they fail."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from axolotl.utils.dict import DictDefault
from transformers import AutoConfig, GPT2Config, Phi3Config

from core.models.kernels import LIGER_PARTS, LORA_KERNELS, LigerPart
from core.recipes.axolotl.recipe import LIGER_PLUGIN
from core.recipes.axolotl.rules import LORA_KERNELS as LORA_KEYS
from tests.trainer import tiny
from trainer.axolotl.patches import (
    do_without_liger,
    do_without_lora_kernels,
    leave_out_what_fails,
    use_installed_attention,
)

ROOT = Path(__file__).parents[3]
#: What most have: rotation, norms and SwiGLU; norms with an offset, GeGLU and capped logits.
SAMPLE = ["liger:qwen3", "liger:gemma2", "lora:qwen3"]
OTHERS = [
    *(f"liger:{kind}" for kind in LIGER_PARTS if f"liger:{kind}" not in SAMPLE),
    *(f"lora:{kind}" for kind in sorted(LORA_KERNELS) if f"lora:{kind}" not in SAMPLE),
]


def gaps(names: list[str]) -> dict[str, tuple[float, float]]:
    """Of the loss, and of the worst gradient relative to its largest entry."""
    for package in ("triton", "liger_kernel"):
        pytest.importorskip(package, reason=f"{package} is not installed: its kernels run nowhere here")
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.axolotl.interpreted", *names],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return {name: (loss, gradient) for name, loss, gradient in lines}


def test_loss_and_gradients_are_the_same_with_each_kind_of_kernel() -> None:
    found = gaps(SAMPLE)
    assert found.keys() == set(SAMPLE)
    assert [name for name, (loss, gradient) in found.items() if loss > 2e-6 or gradient > 5e-6] == []


@pytest.mark.thorough
def test_loss_and_gradients_are_the_same_for_every_architecture_that_is_planned_with_kernels() -> None:
    found = gaps([*OTHERS, "lora:gemma"])
    gemma = found.pop("lora:gemma")
    assert found.keys() == set(OTHERS)
    assert [name for name, (loss, gradient) in found.items() if loss > 2e-6 or gradient > 5e-6] == []
    assert gemma[1] > 1e-5, "Axolotl computes Gemma's activation as it is: it can be planned with kernels"


class Notes(list[tuple[str, str]]):
    def __call__(self, kind: str, text: str) -> None:
        self.append((kind, text))


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Axolotl's, as it was afterwards."""
    kind: Any = importlib.import_module("axolotl.loaders.patch_manager").PatchManager
    for name in ("_apply_self_attention_lora_patch", "_apply_lora_kernel_patch"):
        monkeypatch.setattr(kind, name, getattr(kind, name))
    return kind


def lora_cfg(folder: Path) -> Any:
    kind = AutoConfig.from_pretrained(folder).model_type
    return DictDefault(base_model=str(folder), model_config_type=kind, **dict.fromkeys(LORA_KEYS, True))


@pytest.mark.parametrize("config", [Phi3Config(), GPT2Config()], ids=["phi3", "gpt2"])
def test_an_attention_layer_that_axolotl_cannot_rewrite_keeps_its_own_code(
    config: Any, manager: Any, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    cfg, notes = lora_cfg(tmp_path), Notes()
    do_without_lora_kernels(notes)
    its: Any = SimpleNamespace(cfg=cfg)
    manager._apply_self_attention_lora_patch(its)
    assert not any(cfg[key] for key in LORA_KEYS)
    ((kind, text),) = notes
    assert kind == "lora_kernels"
    assert "left out: AssertionError: Original QKV code not found" in text


def test_a_rewritten_attention_layer_is_restored_where_the_kernels_cannot_be_attached(
    manager: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.save(tmp_path)
    cfg, notes = lora_cfg(tmp_path), Notes()
    module: Any = importlib.import_module("axolotl.monkeypatch.lora_kernels")
    layer = module.get_attention_cls_from_config(cfg)
    monkeypatch.setattr(layer, "forward", layer.forward)
    before = layer.forward
    do_without_lora_kernels(notes)
    its: Any = SimpleNamespace(cfg=cfg)
    try:
        manager._apply_self_attention_lora_patch(its)
        assert layer.forward is not before
        manager._apply_lora_kernel_patch(its, "not a model of peft's")
        assert layer.forward is before
    finally:
        if hasattr(layer, "_original_forward"):
            del layer._original_forward
    assert [kind for kind, _ in notes] == ["lora_kernels"]
    assert "TypeError" in notes[0][1]


@pytest.mark.parametrize("fused", [True, False])
def test_without_liger_the_loss_is_computed_in_chunks_instead(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin: Any = importlib.import_module("axolotl.integrations.liger.plugin").LigerPlugin
    monkeypatch.setattr(plugin, "pre_model_load", plugin.pre_model_load)
    losses: Any = importlib.import_module("transformers.loss.loss_utils")
    plain = losses.ForCausalLMLoss
    monkeypatch.setattr(losses, "ForCausalLMLoss", plain)
    monkeypatch.setitem(losses.LOSS_MAPPING, "ForCausalLM", plain)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.cross_entropy", None)
    notes = Notes()
    do_without_liger(notes)
    cfg = DictDefault(model_config_type="llama", liger_rope=True, liger_rms_norm=True)
    cfg[LigerPart.LOSS.value] = fused
    plugin().pre_model_load(cfg)
    assert not any(cfg[part.value] for part in LigerPart)
    assert (losses.LOSS_MAPPING["ForCausalLM"] is not plain) is fused
    assert [kind for kind, _ in notes] == ["liger"]
    assert "cross_entropy" in notes[0][1]


@pytest.mark.parametrize(
    ("there", "asked", "used"),
    [
        ((), "flash_attention_3", "sdpa"),
        ((2,), "flash_attention_3", "flash_attention_2"),
        ((2, 3), "flash_attention_3", "flash_attention_3"),
        ((), "flash_attention_2", "sdpa"),
        ((), "flex_attention", "flex_attention"),
        ((), None, None),
    ],
)
def test_flash_attention_that_is_not_installed_is_replaced_before_axolotl_checks_the_configuration(
    there: tuple[int, ...], asked: str | None, used: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: 2 in there)
    monkeypatch.setattr("transformers.utils.is_flash_attn_3_available", lambda **_: 3 in there)
    hub = "axolotl.monkeypatch.attention.fa2_hub_kernel.is_fa2_hub_kernel_available"
    monkeypatch.setattr(hub, lambda: False)
    config = {"attn_implementation": asked}
    use_installed_attention(config)
    assert config["attn_implementation"] == used


def test_nothing_is_imported_for_kernels_that_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(importlib, "import_module", asked.append)
    leave_out_what_fails({"plugins": ["trainer.axolotl.plugin"], "lora_mlp_kernel": False}, Notes())
    assert asked == []
    with pytest.raises(AttributeError):
        leave_out_what_fails({"plugins": [LIGER_PLUGIN]}, Notes())
    assert asked == ["axolotl.integrations.liger.plugin"]
