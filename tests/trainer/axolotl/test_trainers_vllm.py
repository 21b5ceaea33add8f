"""The weights that vLLM gets: TRL's own code with a stand-in for vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from trl.generation.vllm_generation import VLLMGeneration

from tests.trainer import tiny
from tests.trainer.sharding import adapted
from trainer.axolotl.trainers import fresh_weights, merged_weights


class Engine:
    """Weights by name, as vLLM holds them: lost by sleeping, the base's after reading its files."""

    def __init__(self, base: Any) -> None:
        self._files = {name: weight.clone() for name, weight in base.state_dict().items()}
        self.weights: dict[str, torch.Tensor] = {}
        self.generated_with: dict[str, torch.Tensor] = {}
        model = SimpleNamespace(load_weights=self.weights.update)
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=runner))

    def wake_up(self, tags: list[str]) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def sleep(self, level: int) -> None:
        self.weights.clear()

    def collective_rpc(self, method: str) -> None:
        assert method == "reload_weights"
        self.weights.update(self._files)


def generation_of(model: Any, base: Any) -> Any:
    """TRL's, as its start would leave it where vLLM can be started."""
    generation = VLLMGeneration.__new__(VLLMGeneration)
    generation.__dict__.update(
        model=model,
        mode="colocate",
        enable_sleep_mode=True,
        llm=Engine(base),
        accelerator=SimpleNamespace(is_main_process=True),
        _dist=SimpleNamespace(is_fsdp=False, gather_params=lambda _: torch.no_grad()),
    )
    return generation


def generate(generation: Any) -> dict[str, torch.Tensor]:
    """The order of TRL's trainer: hand over, then wake and read files, generate, sleep."""
    generation.sync_weights()
    generation.llm.wake_up(tags=["weights"])
    generation.llm.collective_rpc("reload_weights")
    found = dict(generation.llm.weights)
    generation.llm.sleep(level=2)
    return found


def test_vllm_generates_with_the_trained_weights_after_it_has_slept() -> None:
    model, base = tiny.model(seed=1), tiny.model(seed=2)
    generation = generation_of(model, base)
    for _ in range(2):
        with fresh_weights(generation):
            found = generate(generation)
        for name, weight in model.named_parameters():
            assert torch.equal(found[name], weight)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.01)
    assert "sync_weights" not in generation.__dict__


def test_adapters_are_added_and_leave_a_bf16_base_as_it_was() -> None:
    model, base = adapted().to(torch.bfloat16), tiny.model().to(torch.bfloat16)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    expected = {name: weight.clone() for name, weight in base.named_parameters()}
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    for name, layer in layers.items():
        own = f"{name.removeprefix('base_model.model.')}.weight"
        added = layer.get_delta_weight("default").float()
        assert float(added.abs().max()) > 0
        expected[own] = (expected[own].float() + added).to(torch.bfloat16)
    generation = generation_of(model, base)
    with fresh_weights(generation):
        found = generate(generation)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_what_is_not_plain_is_handed_over_by_trl() -> None:
    assert merged_weights(tiny.model()) is None
    odd = adapted()
    layer = next(layer for layer in odd.modules() if hasattr(layer, "lora_A"))
    layer.base_layer = torch.nn.Sequential(layer.base_layer)
    assert merged_weights(odd) is None
