"""Image tasks of tournaments: how well a model predicts the flow from noise to a picture, in latent space.

A picture's latent is mixed with noise at 16 levels, 16 draws each; the loss is the mean squared error of the
predicted velocity, once with the picture's caption and once with none, the latter weighing three times as
much. The draws are the validators' own (seed, hash, tensor), so two models are compared on the same noise.
What predicts is handed in: this runs wherever a flow-matching model is loaded. It does not cover SDXL,
which is no flow model, nor the older evaluation by whole pictures, which needs ComfyUI.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

SEED, LEVELS, DRAWS = 42, 16, 16
CAPTIONED_WEIGHT = 0.25

#: (noisy latents, level, caption) to velocities of the same shape.
Predictor = Callable[[torch.Tensor, float, str], torch.Tensor]


@dataclass(frozen=True)
class Picture:
    """`latent` has the model's own scale and one picture; `digest` is the SHA-256 of the picture's file."""

    latent: torch.Tensor
    digest: str
    caption: str


@dataclass(frozen=True)
class Case:
    level: float
    noisy: torch.Tensor
    #: What is to be predicted: the noise less the latent.
    target: torch.Tensor


def cases(picture: Picture, levels: int = LEVELS, draws: int = DRAWS) -> Iterator[Case]:
    latent = picture.latent.detach().float().cpu()
    for band in range(levels):
        level = (band + 0.5) / levels
        noise = torch.cat([_noise(latent, _seed(picture.digest, band, draw)) for draw in range(draws)])
        yield Case(level, (1 - level) * latent + level * noise, noise - latent)


def _seed(digest: str, band: int, draw: int) -> int:
    key = f"{SEED}:{digest}:{band}:{draw}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "little") % (2**63 - 1)


def _noise(latent: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(latent.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def flow_loss(predict: Predictor, picture: Picture, caption: str, *, together: int = 2) -> float:
    """The mean over all levels and draws, `together` draws in a pass."""
    errors: list[float] = []
    for case in cases(picture):
        for noisy, target in zip(case.noisy.split(together), case.target.split(together), strict=True):
            with torch.no_grad():
                velocity = predict(noisy, case.level, caption).float().cpu()
            errors += (velocity - target).square().flatten(1).mean(1).tolist()
    return sum(errors) / len(errors)


def picture_losses(predict: Predictor, pictures: Sequence[Picture]) -> list[float]:
    """Of each picture, with and without its caption, weighed as validators weigh."""
    return [
        CAPTIONED_WEIGHT * flow_loss(predict, one, one.caption)
        + (1 - CAPTIONED_WEIGHT) * flow_loss(predict, one, "")
        for one in pictures
    ]
