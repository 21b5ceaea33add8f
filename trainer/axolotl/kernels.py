"""Kernels that cannot be loaded are left out, and the training goes on without them.

What fails in a step is met by the next attempt (`core.runs.kernel_failures`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, MutableMapping
from typing import Any

from core.domain.choices import Attention
from core.models.kernels import LigerPart
from core.recipes.axolotl.recipe import LIGER_PLUGIN
from core.recipes.axolotl.rules import LORA_KERNELS
from trainer.inputs.model_loading import NEXT_ATTENTION

Note = Callable[[str, str], None]


def leave_out_what_fails(config: MutableMapping[str, Any], note: Note) -> None:
    """From now on; `config` is Axolotl's configuration as it was read, `note` tells the operator."""
    use_installed_attention(config)
    if LIGER_PLUGIN in (config.get("plugins") or []):
        do_without_liger(note)
    if any(config.get(key) for key in LORA_KERNELS):
        do_without_lora_kernels(note)


def use_installed_attention(config: MutableMapping[str, Any]) -> None:
    """Axolotl refuses a configuration with flash attention where a GPU is visible and the package is not
    there, before any model is loaded. What is used in the end is noted when it is."""
    named = config.get("attn_implementation")
    while named in _INSTALLED and not _INSTALLED[named]():
        named = NEXT_ATTENTION[Attention(named)].value
        config["attn_implementation"] = named


def _flash_2_is_there() -> bool:
    utils: Any = importlib.import_module("transformers.utils")
    hub: Any = importlib.import_module("axolotl.monkeypatch.attention.fa2_hub_kernel")
    return not _cuda() or utils.is_flash_attn_2_available() or hub.is_fa2_hub_kernel_available()


def _flash_3_is_there() -> bool:
    utils: Any = importlib.import_module("transformers.utils")
    return not _cuda() or utils.is_flash_attn_3_available(kernels_fallback_ok=True)


def _cuda() -> bool:
    return bool(importlib.import_module("torch").cuda.is_available())


_INSTALLED: dict[str, Callable[[], bool]] = {
    Attention.FLASH_2.value: _flash_2_is_there,
    Attention.FLASH_3.value: _flash_3_is_there,
}


def do_without_liger(note: Note) -> None:
    """Its plugin imports Liger, Triton and the model's code, and Liger refuses some parts of some models."""
    plugin: Any = importlib.import_module("axolotl.integrations.liger.plugin").LigerPlugin
    load = plugin.pre_model_load

    def attempt(self: Any, cfg: Any) -> None:
        try:
            load(self, cfg)
        except Exception as error:  # noqa: BLE001 - whatever it is, transformers' own code remains
            note("liger", f"left out: {type(error).__name__}: {str(error)[:200]}")
            in_chunks = cfg[LigerPart.LOSS.value]
            for part in LigerPart:
                cfg[part.value] = False
            if in_chunks:
                importlib.import_module("axolotl.monkeypatch.loss.chunked").patch_chunked_ce_loss_fn()

    plugin.pre_model_load = attempt


def do_without_lora_kernels(note: Note) -> None:
    """Axolotl rewrites the source of the model's attention layer, and stops where it does not find what it
    knows."""
    manager: Any = importlib.import_module("axolotl.loaders.patch_manager").PatchManager
    rewrite, apply = manager._apply_self_attention_lora_patch, manager._apply_lora_kernel_patch
    #: The layer's class, and its own code.
    rewritten: list[tuple[Any, Any]] = []

    def leave_out(cfg: Any, error: Exception) -> None:
        note("lora_kernels", f"left out: {type(error).__name__}: {str(error)[:200]}")
        for key in LORA_KERNELS:
            cfg[key] = False
        for layer, forward in rewritten:
            layer.forward = forward

    def attempt_rewrite(self: Any) -> None:
        try:
            if self.cfg.lora_qkv_kernel or self.cfg.lora_o_kernel:
                layer = _attention_layer(self.cfg)
                rewritten.append((layer, layer.forward))
            rewrite(self)
        except Exception as error:  # noqa: BLE001 - whatever it is, peft's own code remains
            leave_out(self.cfg, error)

    def attempt_apply(self: Any, model: Any) -> None:
        try:
            apply(self, model)
        except Exception as error:  # noqa: BLE001 - likewise
            leave_out(self.cfg, error)

    manager._apply_self_attention_lora_patch = attempt_rewrite
    manager._apply_lora_kernel_patch = attempt_apply


def _attention_layer(cfg: Any) -> Any:
    module: Any = importlib.import_module("axolotl.monkeypatch.lora_kernels")
    return module.get_attention_cls_from_config(cfg)
