"""Weights for a vLLM in the trainer's process that sleeps between generations.

Two habits of TRL 1.9 are replaced. It hands over the weights and then lets vLLM read the base's files again
(trl #5312): the completions are the untrained model's. And it merges adapters into the base and takes them
out again (#6688), which in bf16 leaves the base a little different at every step.

Written for a model that is whole on its GPU. Not run with a vLLM yet, which needs a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_RELOAD = "reload_weights"


@contextlib.contextmanager
def fresh_weights(generation: Any) -> Iterator[None]:
    """While it is open, `generation` (TRL's `VLLMGeneration`) reads files before our weights come, not after,
    and adapters are added to copies."""
    llm = getattr(generation, "llm", None)
    if llm is None:  # vLLM is a server: it does not sleep
        yield
        return
    sync, call = generation.sync_weights, llm.collective_rpc

    def read_then_sync() -> None:
        if generation.enable_sleep_mode:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            llm.wake_up(tags=["weights"])
            # Sleeping loses what is no weight too, such as tables of positions.
            with contextlib.suppress(NotImplementedError):
                call(_RELOAD)
        adapted = merged_weights(generation.model)
        if adapted is None:
            sync()
            return
        for name, weight in adapted:
            generation._push_param_to_vllm(generation._fix_param_name_to_vllm(name), weight)
        llm.reset_prefix_cache()

    def without_reload(method: Any, *arguments: Any, **named: Any) -> Any:
        return None if method == _RELOAD else call(method, *arguments, **named)

    generation.sync_weights, llm.collective_rpc = read_then_sync, without_reload
    try:
        yield
    finally:
        del generation.sync_weights, llm.collective_rpc


def merged_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]] | None:
    """Names without peft's parts, and weights with their adapters added in fp32, one after the other. None
    for a model without adapters, and for one that TRL has to hand over: sharded, quantised, or with adapters
    on something other than linear layers."""
    adapted = {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    plain = all(type(layer.get_base_layer()) is nn.Linear for layer in adapted.values())
    sharded = any(type(weight).__name__ == "DTensor" for weight in model.parameters())
    saved = any("modules_to_save" in name for name, _ in model.named_modules())
    return _merged(model, adapted) if adapted and plain and not sharded and not saved else None


def _merged(model: Any, adapted: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if model.prefix in name:
                continue
            layer_name, _, last = name.rpartition(".base_layer.")
            value = weight.data
            if last == "weight":
                layer = adapted[layer_name]
                added = sum(layer.get_delta_weight(active).float() for active in layer.active_adapters)
                value = (value.float() + added).to(value.dtype)
            yield name.removeprefix("base_model.model.").replace(".base_layer", ""), value
