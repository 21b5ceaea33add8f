"""What surrounds ai-toolkit's own classes; those themselves need its checkout and run by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trainer.scoring.pictures_ai_toolkit import ToolkitModel, _inside, _mode_of, _rank
from trainer.scoring.pictures_rules import NotScored


class Network:
    """Takes every tensor whose name it knows; counts how often its layers are emptied."""

    def __init__(self) -> None:
        self.is_active, self.emptied, self.loaded = False, 0, {}

    def get_all_modules(self) -> list[Any]:
        return [self]

    def reset_weights(self) -> None:
        self.emptied += 1

    def load_weights(self, weights: dict[str, Any]) -> dict[str, Any] | None:
        self.loaded = {name: value for name, value in weights.items() if "known" in name}
        return {name: value for name, value in weights.items() if name not in self.loaded} or None


class Base:
    torch_dtype = torch.bfloat16
    assistant_lora = None

    def __init__(self, network: Network) -> None:
        self.network, self.seen = network, []
        self.unconditional_lora = SimpleNamespace(is_active=False)

    def predict_noise(self, latent: Any, **options: Any) -> Any:
        adapters = self.network.is_active, self.unconditional_lora.is_active
        self.seen.append((adapters, options["text_embeddings"], float(options["timestep"])))
        return latent


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ToolkitModel:
    network = Network()
    monkeypatch.setattr(ToolkitModel, "_network", lambda self, config: network)
    monkeypatch.setattr(ToolkitModel, "_no_text", lambda self: "no text")
    job: Any = SimpleNamespace(family="ideogram4", rules=SimpleNamespace(guidance=8.0), files=())
    made = ToolkitModel(Base(network), None, job)
    made.texts = {"a cat": "cat", "": "empty"}
    return made


def test_the_adapter_acts_on_texts_and_the_bases_own_on_the_negative_branch(model: ToolkitModel) -> None:
    model.network.is_active = True
    latent = torch.zeros(1, 4, 2, 2)

    for text in ("a cat", None, ""):
        assert model.velocity(latent, 0.25, text).dtype is torch.float32

    with_text, without_text = (True, False), (False, True)
    assert [(adapters, text) for adapters, text, _ in model.base.seen] == [
        (with_text, "cat"),
        (without_text, "no text"),
        (with_text, "empty"),
    ]
    assert {step for *_, step in model.base.seen} == {250.0}
    assert model.network.is_active


def test_a_file_replaces_the_one_before_and_the_base_is_without_any(
    model: ToolkitModel, tmp_path: Path
) -> None:
    save_file({"known.lora_A.weight": torch.ones(2, 4)}, tmp_path / "a.safetensors")

    model.use(str(tmp_path / "a.safetensors"))
    assert (model.network.is_active, model.network.emptied) == (True, 1)
    assert list(model.network.loaded) == ["known.lora_A.weight"]

    model.use("")
    assert not model.network.is_active


def test_a_file_with_layers_that_the_base_has_not_is_refused(model: ToolkitModel, tmp_path: Path) -> None:
    tensors = {"known.lora_A.weight": torch.ones(2, 4), "text.lora_A.weight": torch.ones(2, 4)}
    save_file(tensors, tmp_path / "a.safetensors")

    with pytest.raises(NotScored, match="1 tensors fit no layer, such as text"):
        model.use(str(tmp_path / "a.safetensors"))
    assert not model.network.is_active


def test_the_rank_is_read_from_the_file(tmp_path: Path) -> None:
    lower = {"a.lora_A.weight": torch.ones(4, 9), "a.lora_B.weight": torch.ones(9, 4)}
    save_file({**lower, "b.lora_A.weight": torch.ones(16, 9)}, tmp_path / "a.safetensors")
    save_file({"a.weight": torch.ones(4, 9)}, tmp_path / "no-adapter.safetensors")

    assert _rank(str(tmp_path / "a.safetensors")) == 16
    with pytest.raises(NotScored, match="has no tensor named like"):
        _rank(str(tmp_path / "no-adapter.safetensors"))


def test_ideograms_noise_lies_where_comfyui_has_it() -> None:
    noise = torch.arange(2 * 4 * 3 * 5).view(1, 8, 3, 5)

    inside = _inside(noise)

    # ComfyUI counts the four corners of a colour together, ai-toolkit the colours of a corner.
    for colour in range(2):
        for corner in range(4):
            assert torch.equal(inside[0, corner * 2 + colour], noise[0, colour * 4 + corner])


def test_pictures_are_encoded_without_chance() -> None:
    vae = SimpleNamespace(encode=lambda x: SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: x)))

    _mode_of(vae)

    assert vae.encode(3).latent_dist.sample() == 3
