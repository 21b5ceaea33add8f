"""Render a picture again out of noise, as the validators' graph does, with any model that predicts."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Protocol

from core.models.image_families import RenderRules
from trainer.scoring.pictures_rules import noise_levels

#: A tensor of the engine; here only added and multiplied.
Latent = Any


class PictureModel(Protocol):
    """A base with its encoders, and at most one adapter at a time."""

    def encode_texts(self, texts: list[str]) -> None:
        """Called once, with all that will be rendered; the text encoder is not needed after it."""

    def use(self, adapter: str) -> None:
        """Load this file in place of the one before; "" is the base alone."""

    def read(self, image: str) -> Any:
        """The picture as validators compare it."""

    def encode(self, picture: Any) -> tuple[Latent, int, int]:
        """Its latent, its width and its height."""

    def noise(self, latent: Latent, seed: int) -> Latent: ...

    def velocity(self, latent: Latent, sigma: float, text: str | None) -> Latent:
        """Noise less picture. Without a text: the negative branch, without the adapter."""

    def loss(self, latent: Latent, picture: Any) -> float:
        """The mean squared difference of pixels in [0, 1]."""


def render(model: PictureModel, rules: RenderRules, picture: Any, seed: int, text: str) -> Latent:
    latent, width, height = picture
    levels = noise_levels(rules, width, height)
    noisy = model.noise(latent, seed) * levels[0] + latent * (1.0 - levels[0])
    if rules.second_order:
        return _dpmpp_2m(model, rules, noisy, levels, text)
    for sigma, following in pairwise(levels):
        noisy = noisy + _guided(model, rules, noisy, sigma, text) * (following - sigma)
    return noisy


def _one_branch(rules: RenderRules, text: str) -> bool:
    """The negative text is the empty one: against itself, no guidance remains."""
    return rules.embedded or rules.guidance == 1.0 or not text


def _guided(model: PictureModel, rules: RenderRules, noisy: Latent, sigma: float, text: str) -> Latent:
    wanted = model.velocity(noisy, sigma, text)
    if rules.late is not None:
        later, below = rules.late
        guidance, other = later if sigma <= below else rules.guidance, model.velocity(noisy, sigma, None)
    elif _one_branch(rules, text):
        return wanted
    else:
        guidance, other = rules.guidance, model.velocity(noisy, sigma, "")
    return other + (wanted - other) * guidance


def _dpmpp_2m(
    model: PictureModel, rules: RenderRules, noisy: Latent, levels: list[float], text: str
) -> Latent:
    """DPM-Solver++ of second order, in steps of -log(sigma); the step to 0 is the prediction itself."""
    before: tuple[Latent, float] | None = None
    for sigma, following in pairwise(levels):
        clean = noisy - _guided(model, rules, noisy, sigma, text) * sigma
        if following == 0.0:
            return clean
        step = math.log(sigma / following)
        target = clean
        if before is not None:
            last_clean, last_step = before
            share = step / (2.0 * last_step)
            target = clean * (1.0 + share) - last_clean * share
        noisy = noisy * (following / sigma) - target * math.expm1(-step)
        before = clean, step
    return noisy
