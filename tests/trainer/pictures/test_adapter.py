"""The adapter beside ComfyUI's layers, and its file in ComfyUI's loader."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.models.image_families import PictureRecipe
from tests.trainer.pictures.little import picture_model
from trainer.errors import BadModel
from trainer.pictures.adapter import Adapter, AdapterWeights, Factors, mean_of, save_adapter
from trainer.pictures.stack import BadAdapter, FlowModel, Stack

pytestmark = pytest.mark.small


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    return Stack(picture_model(tmp_path))


@pytest.fixture
def base(stack: Stack) -> FlowModel:
    return stack.load_base(stack.model.base_path)


def changed(adapter: Adapter) -> AdapterWeights:
    """Weights that change the model."""
    torch.manual_seed(2)
    return {name: Factors(down, torch.randn_like(up) / 8) for name, (down, up) in adapter.nothing().items()}


def output_of(model: FlowModel) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        return model.model.apply_model(torch.randn(1, 4, 8, 2), torch.tensor([0.4]), torch.ones(1, 1, 1, 16))


def merged_output(stack: Stack, base: FlowModel, weights: AdapterWeights, file: Path) -> torch.Tensor:
    from comfy.samplers import merged
    from comfy.sd import ModelPatcher

    save_adapter(weights, file)
    return output_of(ModelPatcher(merged(stack.with_adapter(base, file))))


def test_beside_the_layers_it_does_what_merging_does(stack: Stack, base: FlowModel, tmp_path: Path) -> None:
    adapter = Adapter(base.model.diffusion_model, PictureRecipe(rank=4, alpha=8.0), stack.device)
    weights, plain = changed(adapter), output_of(base)
    with adapter.using(weights):
        beside = output_of(base)
    assert (beside - plain).abs().max() > 0.01
    torch.testing.assert_close(beside, merged_output(stack, base, weights, tmp_path / "a.safetensors"))
    assert torch.equal(output_of(base), plain)


def test_what_is_trained_is_what_is_saved(stack: Stack, base: FlowModel) -> None:
    adapter = Adapter(base.model.diffusion_model, PictureRecipe(rank=4, alpha=8.0), stack.device)
    adapter.begin(1)
    with torch.no_grad():
        for name, parameter in adapter.parameters.items():
            if name.endswith("up"):
                parameter.fill_(0.125)
    with adapter.trained():
        trained = output_of(base)
    with adapter.using(adapter.weights()):
        saved = output_of(base)
    torch.testing.assert_close(trained, saved, rtol=0.02, atol=0.02)
    assert next(iter(adapter.weights().values())).up.max() == 0.25  # the scale of 8 over 4


def test_the_first_one_changes_nothing_and_loads(stack: Stack, base: FlowModel, tmp_path: Path) -> None:
    nothing = Adapter(base.model.diffusion_model, PictureRecipe(), stack.device).nothing()
    merged = merged_output(stack, base, nothing, tmp_path / "a.safetensors")
    torch.testing.assert_close(merged, output_of(base), rtol=0, atol=1e-6)
    assert all(factors.up.any() for factors in nothing.values())  # checks of submissions refuse zeros


def test_a_mean_of_adapters_changes_weights_by_the_mean_of_their_changes() -> None:
    torch.manual_seed(0)
    members = [{"a": Factors(torch.randn(rank, 6), torch.randn(5, rank))} for rank in (2, 3, 2)]
    mean = mean_of(members)["a"]
    assert mean.down.shape == (7, 6)
    wanted = torch.stack([member["a"].up @ member["a"].down for member in members]).mean(0)
    torch.testing.assert_close(mean.up @ mean.down, wanted)


@pytest.mark.parametrize(
    ("targets", "count"),
    [(None, 9), (r"\.mlp\.", 4), (r"^double_blocks\.1\.", 3)],
)
def test_a_pattern_chooses_layers(stack: Stack, base: FlowModel, targets: str | None, count: int) -> None:
    adapter = Adapter(base.model.diffusion_model, PictureRecipe(targets=targets), stack.device)
    assert len(adapter.nothing()) == count


def test_a_pattern_without_layers_is_refused(stack: Stack, base: FlowModel) -> None:
    with pytest.raises(BadModel, match="'attn'"):
        Adapter(base.model.diffusion_model, PictureRecipe(targets="attn"), stack.device)


def test_one_name_that_is_not_loaded_is_refused(stack: Stack, base: FlowModel, tmp_path: Path) -> None:
    weights = dict(Adapter(base.model.diffusion_model, PictureRecipe(), stack.device).nothing())
    down, up = weights["double_blocks.1.modulation"]
    weights["double_blocks.7.modulation"] = Factors(down.clone(), up.clone())
    save_adapter(weights, tmp_path / "a.safetensors")
    with pytest.raises(BadAdapter, match=r"2 entries.*double_blocks\.7\.modulation"):
        stack.with_adapter(base, tmp_path / "a.safetensors")


def test_a_file_that_patches_nothing_is_refused(stack: Stack, base: FlowModel, tmp_path: Path) -> None:
    save_adapter({}, tmp_path / "a.safetensors")
    with pytest.raises(BadAdapter, match="no weight"):
        stack.with_adapter(base, tmp_path / "a.safetensors")
