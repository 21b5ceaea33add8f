"""ComfyUI as the trainer uses it: what it loads and refuses, and what training asks of its models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.domain.tasks import ImageModelType
from core.models.image_families import PictureRecipe
from tests.trainer.pictures.little import picture_model, write_pictures
from trainer.errors import BadModel
from trainer.pictures.adapter import Adapter
from trainer.pictures.dataset import read_pictures
from trainer.pictures.measure import case_noise, noisy, sigma_of
from trainer.pictures.stack import (
    BadAdapter,
    Predict,
    Stack,
    TrainedPicture,
    make_trainable,
    recompute_blocks,
)

pytestmark = pytest.mark.small


def no_note(kind: str, text: str) -> None:
    raise AssertionError(text)


def encoded(stack: Stack, base: object, folder: Path) -> list[TrainedPicture]:
    pictures = stack.encode_pictures(base, read_pictures(write_pictures(folder, 2), no_note))
    stack.encode_texts(["", *(picture.caption for picture in pictures)])
    return pictures


def test_losses_are_the_models_own_flow_against_the_noise(tmp_path: Path) -> None:
    stack = Stack(picture_model(tmp_path))
    base = stack.load_base(stack.model.base_path)
    picture = encoded(stack, base, tmp_path / "pictures")[0]
    assert torch.equal(picture.latent, 2 * picture.encoded)  # what the model makes of the VAE's latent
    losses = stack.losses(base, picture, "", 3, bands=(0, 9))
    sigma, noise = sigma_of(9), case_noise(picture.latent, picture.digest, 9, 3)
    with torch.no_grad():
        flow = base.model.diffusion_model(
            noisy(picture.latent, noise, sigma), torch.full((3,), sigma), torch.zeros(1, 1, 1, 16)
        )
    wanted = (flow - (noise - picture.latent)).square().mean((1, 2, 3))
    assert [len(row) for row in losses] == [3, 3]
    assert losses[1] == pytest.approx(wanted.tolist(), rel=1e-4)


def test_texts_are_predicted_with(tmp_path: Path) -> None:
    stack = Stack(picture_model(tmp_path))
    base = stack.load_base(stack.model.base_path)
    picture = encoded(stack, base, tmp_path / "pictures")[0]
    assert stack.losses(base, picture, picture.caption, 1) != stack.losses(base, picture, "", 1)


@pytest.mark.parametrize("recomputed", [False, True])
def test_gradients_of_blocks_that_change_their_inputs_are_right(tmp_path: Path, recomputed: bool) -> None:
    stack = Stack(picture_model(tmp_path))
    base = stack.load_base(stack.model.base_path)
    make_trainable(base.model.diffusion_model)
    if recomputed:
        recompute_blocks(base.model.diffusion_model)
    adapter = Adapter(base.model.diffusion_model, PictureRecipe(rank=2), stack.device)
    adapter.begin(1)
    with torch.no_grad():
        for parameter in adapter.parameters.values():
            parameter.add_(0.1)
    picture = encoded(stack, base, tmp_path / "pictures")[0]

    def loss(backward: bool = False) -> float:
        found: list[float] = []

        def visit(predict: Predict) -> None:
            value = predict(picture.latent, torch.tensor([0.5])).square().mean()
            if backward:
                value.backward()
            found.append(value.item())

        with stack.training(), adapter.trained(), torch.set_grad_enabled(backward):
            stack.predicting(base, picture, "", visit)
        return found[0]

    loss(backward=True)
    gradients = {name: parameter.grad for name, parameter in adapter.parameters.items()}
    assert all(gradient is not None for gradient in gradients.values())
    for name in ("double_blocks.0.mlp.0.down", "double_blocks.1.modulation.up", "img_in.up"):
        parameter, step = adapter.parameters[name], 1e-2
        with torch.no_grad():
            parameter[0, 0] += step
            above = loss()
            parameter[0, 0] -= 2 * step
            below = loss()
            parameter[0, 0] += step
        assert gradients[name][0, 0].item() == pytest.approx((above - below) / (2 * step), rel=0.05, abs=1e-4)


def test_predictions_that_do_not_repeat_are_refused(tmp_path: Path) -> None:
    stack = Stack(picture_model(tmp_path))
    base = stack.load_base(stack.model.base_path)
    picture = encoded(stack, base, tmp_path / "pictures")[0]
    stack.check_repeatable(base, picture)
    base.model.diffusion_model.final_layer.register_forward_hook(lambda *given: given[2] + torch.randn(4))
    with pytest.raises(BadAdapter, match="repeat"):
        stack.check_repeatable(base, picture)


def test_a_family_that_is_not_scored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="sdxl"):
        Stack(picture_model(tmp_path, ImageModelType.SDXL))


def test_a_folder_without_comfyui_is_named(tmp_path: Path) -> None:
    model = picture_model(tmp_path).model_copy(update={"comfy_dir": str(tmp_path / "nowhere")})
    with pytest.raises(BadModel, match="nowhere is no checkout"):
        Stack(model)


def test_a_base_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    stack = Stack(picture_model(tmp_path))
    with pytest.raises(BadModel, match="one weight file"):
        stack.load_base(str(tmp_path))


def test_a_model_that_predicts_something_else_is_refused(tmp_path: Path) -> None:
    stack = Stack(picture_model(tmp_path))
    weights = load_file(stack.model.base_path)
    save_file({**weights, "epsilon": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(BadModel, match="rectified flow"):
        stack.load_base(str(tmp_path / "other.safetensors"))
