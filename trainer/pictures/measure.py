"""The measure of picture tournaments: the mean squared error of the predicted flow, equal to the evaluation's
to the last digit.

A picture is scored with its caption and with the empty text. For each it has 16 bands of noise levels and 16
draws of noise; the loss of a text is the mean over these 256 cases, the score half and half. Lower wins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from statistics import fmean

import torch
from PIL import Image
from torch import Tensor

from core.domain.tournament_rules import BANDS

_MASTER_SEED = 42
_LONG_SIDE, _MULTIPLE = 1024, 16


class UnusablePicture(ValueError):
    """A picture of which nothing is left once it is brought to size."""


def prepared(picture: Image.Image) -> Image.Image:
    """Bring the long side to 1,024 and cut the middle to multiples of 16, in RGB."""
    width, height = picture.size
    size = (
        (_LONG_SIDE, int(height / width * _LONG_SIDE))
        if width > height
        else (int(width / height * _LONG_SIDE), _LONG_SIDE)
    )
    kept = [side // _MULTIPLE * _MULTIPLE for side in size]
    if not all(kept):
        raise UnusablePicture(f"{width}×{height} leaves no 16 pixels on its short side")
    left, top = ((side - part) // 2 for side, part in zip(size, kept, strict=True))
    resized = picture.resize(size, Image.Resampling.LANCZOS)
    return resized.crop((left, top, left + kept[0], top + kept[1])).convert("RGB")


def picture_digest(picture: Image.Image) -> str:
    """Identify a prepared picture; its noise is drawn from this."""
    return hashlib.sha256(picture.tobytes() + str(picture.size).encode()).hexdigest()


def case_seed(digest: str, band: int, draw: int) -> int:
    key = f"{_MASTER_SEED}:{digest}:{band}:{draw}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") % (2**63 - 1)


def case_noise(latent: Tensor, digest: str, band: int, draws: int) -> Tensor:
    """The noise of a band's first draws, for a latent of one picture, which gives the shape."""
    generators = [torch.Generator().manual_seed(case_seed(digest, band, draw)) for draw in range(draws)]
    return torch.cat(
        [torch.randn(latent.shape, generator=generator, dtype=torch.float32) for generator in generators]
    )


def sigma_of(band: int) -> float:
    """The noise level in the middle of a band."""
    return (band + 0.5) / BANDS


def noisy(latent: Tensor, noise: Tensor, sigma: float) -> Tensor:
    return (1 - sigma) * latent + sigma * noise


def flow_losses(noised: Tensor, denoised: Tensor, target: Tensor, sigma: float) -> Tensor:
    """The loss of each case. `denoised` is what the model takes for the picture, `target` the noise less the
    latent."""
    flow = (noised.float() - denoised.float()) / sigma
    return (flow - target.float()).square().flatten(1).mean(1)


def score(text: Sequence[float], no_text: Sequence[float]) -> float:
    """Score from the loss of each picture with its caption and with the empty text."""
    return 0.5 * fmean(text) + 0.5 * fmean(no_text)
