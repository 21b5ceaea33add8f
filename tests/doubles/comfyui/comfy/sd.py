"""Models, their patches, encoders and VAE."""

from __future__ import annotations

import copy
import hashlib
import logging
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from comfy.ldm.flux.layers import Block
from comfy.model_sampling import CONST, EPS
from comfy.utils import load_torch_file

#: Of the latents, the model and its texts.
CHANNELS, WIDTH = 4, 16


class FlowNet(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.img_in = nn.Linear(CHANNELS, WIDTH)
        self.time_in = nn.Linear(1, WIDTH)
        self.double_blocks = nn.ModuleList(Block(WIDTH) for _ in range(blocks))
        self.final_layer = nn.Linear(WIDTH, CHANNELS)

    def forward(self, x: Tensor, timestep: Tensor, context: Tensor) -> Tensor:
        hidden = self.img_in(x.movedim(1, -1))
        vec = torch.sin(self.time_in(timestep.view(-1, 1, 1, 1)))
        for block in self.double_blocks:
            hidden = block(hidden, vec, context)
        return self.final_layer(hidden).movedim(-1, 1)


class BaseModel(nn.Module):
    def __init__(self, net: FlowNet, sampling: CONST) -> None:
        super().__init__()
        self.diffusion_model, self.model_sampling = net, sampling

    def process_latent_in(self, latent: Tensor) -> Tensor:
        return 2.0 * latent

    def apply_model(self, x: Tensor, sigma: Tensor, context: Tensor) -> Tensor:
        output = self.diffusion_model(x, sigma, context).float()
        return self.model_sampling.calculate_denoised(sigma, output, x)


class ModelPatcher:
    def __init__(self, model: BaseModel) -> None:
        self.model = model
        self.patches: dict[str, tuple[Tensor, Tensor]] = {}
        self.object_patches: dict[str, Any] = {}
        self.model_options: dict[str, Any] = {"transformer_options": {}}

    def clone(self) -> ModelPatcher:
        other = ModelPatcher(self.model)
        other.patches, other.object_patches = dict(self.patches), dict(self.object_patches)
        return other


def load_diffusion_model(
    path: str, model_options: dict[str, Any], disable_dynamic: bool = False
) -> ModelPatcher:
    weights = load_torch_file(path)
    kind = EPS if weights.pop("epsilon", None) is not None else CONST
    blocks = len({name.split(".")[1] for name in weights if name.startswith("double_blocks.")})
    if not blocks:
        raise RuntimeError(f"ERROR: Could not detect model type of: {path}")
    net = FlowNet(blocks)
    net.load_state_dict(weights)
    sampling = kind()
    sampling.noise_scale = 2.0 if kind is EPS else 1.0
    return ModelPatcher(BaseModel(net, sampling))


class CLIPType(Enum):
    LUMINA2 = 1
    FLUX = 2
    QWEN_IMAGE = 3
    IDEOGRAM4 = 4
    KREA2 = 5


class CLIP:
    """A vector for each text, by its bytes."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def tokenize(self, text: str) -> list[int]:
        return list(hashlib.sha256(text.encode()).digest()[:8]) if text else []

    def encode_from_tokens_scheduled(self, tokens: list[int]) -> list[list[Any]]:
        rows = self.table[[token % len(self.table) for token in tokens]]
        context = rows.mean(0) if tokens else torch.zeros(WIDTH)
        return [[context.view(1, 1, 1, WIDTH), {"pooled_output": None}]]


def load_text_encoder_state_dicts(
    state_dicts: list[dict[str, Tensor]],
    embedding_directory: object,
    clip_type: CLIPType,
    model_options: dict[str, Any],
) -> CLIP:
    return CLIP(state_dicts[0]["table"])


class VAE:
    """The means of squares of 16 pixels."""

    def __init__(self, sd: dict[str, Tensor], dtype: torch.dtype) -> None:
        self.first_stage_model = nn.Module()
        self._colours = sd["colours"].to(dtype)

    def encode(self, pixels: Tensor) -> Tensor:
        means = nn.functional.avg_pool2d(pixels.movedim(-1, 1) * 2 - 1, 16)
        return torch.einsum("bchw,dc->bdhw", means, self._colours)


def load_lora_for_models(
    model: ModelPatcher,
    clip: object,
    lora: dict[str, Tensor],
    strength_model: float,
    strength_clip: float,
    lora_metadata: object = None,
) -> tuple[ModelPatcher, object]:
    patched, used = model.clone(), set()
    for name in model.model.diffusion_model.state_dict():
        module = f"diffusion_model.{name.removesuffix('.weight')}"
        up, down = f"{module}.lora_up.weight", f"{module}.lora_down.weight"
        if name.endswith(".weight") and up in lora:
            patched.patches[name] = (lora[up].float() * strength_model, lora[down].float())
            used |= {up, down}
    for key in lora:
        if key not in used:
            logging.warning("lora key not loaded: %s", key)
    return patched, clip


def merged(patcher: ModelPatcher) -> BaseModel:
    """The model with its patches in its weights."""
    if not patcher.patches:
        return patcher.model
    model = copy.deepcopy(patcher.model)
    for name, (up, down) in patcher.patches.items():
        weight = model.diffusion_model.get_parameter(name)
        weight.data += up @ down
    return model
