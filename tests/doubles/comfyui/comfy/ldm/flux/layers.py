"""A block that adds to its input in place, as flux's do."""

import torch
from torch import Tensor, nn

import comfy.model_management


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.pre_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, vec: Tensor, text: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not comfy.model_management.in_training:
            raise RuntimeError("the fast form of an operation has no gradient")
        scale = 1 + self.modulation(vec)
        x += self.mlp(self.pre_norm(x) * scale + text)
        return x
