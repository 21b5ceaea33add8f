"""Numbers stand for latents: the sampler only adds and multiplies."""

from __future__ import annotations

import math
from typing import Any

import pytest

from core.models.image_families import IMAGE_FAMILIES, RenderRules
from trainer.scoring import pictures
from trainer.scoring.pictures import render
from trainer.scoring.pictures_rules import noise_levels

PICTURE = 0.7
RULES = {str(kind): record.render for kind, record in IMAGE_FAMILIES.items() if record.render}


class Numbers:
    """Moves towards a target that depends on the text; remembers what it was asked."""

    def __init__(self, targets: dict[str | None, float]) -> None:
        self.targets = targets
        self.asked: list[tuple[str | None, float]] = []

    def noise(self, latent: float, seed: int) -> float:
        return float(seed)

    def velocity(self, latent: float, sigma: float, text: str | None) -> float:
        self.asked.append((text, sigma))
        return (latent - self.targets[text]) / sigma


def rendered(family: str, model: Any, text: str) -> float:
    return float(render(model, RULES[family], (PICTURE, 1024, 1024), 3, text))


@pytest.mark.parametrize("family", sorted(RULES))
def test_a_model_that_knows_the_picture_renders_it_whatever_the_noise(family: str) -> None:
    model = Numbers({"a cat": PICTURE, "": PICTURE, None: PICTURE})

    assert rendered(family, model, "a cat") == pytest.approx(PICTURE)
    assert rendered(family, model, "") == pytest.approx(PICTURE)


def plain_rules(
    monkeypatch: pytest.MonkeyPatch, levels: list[float], *, second_order: bool = False
) -> RenderRules:
    monkeypatch.setattr(pictures, "noise_levels", lambda *_: levels)
    steps = len(levels) - 1
    return RenderRules(steps=steps, guidance=1.0, denoise=1.0, passes=steps, second_order=second_order)


def test_the_first_level_mixes_noise_and_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = plain_rules(monkeypatch, [0.25, 0.0])
    model = Numbers({"": 0.0})
    model.velocity = lambda latent, sigma, text: latent  # type: ignore[method-assign]

    # 0.25 x 3 + 0.75 x 0.7 = 1.275; one step of Euler takes a quarter of it away.
    assert render(model, rules, (PICTURE, 16, 16), 3, "") == pytest.approx(1.275 * 0.75)  # type: ignore[arg-type]


def test_guidance_goes_past_the_caption_away_from_the_empty_text() -> None:
    model = Numbers({"a cat": 0.5, "": 0.4})

    assert rendered("krea2", model, "a cat") == pytest.approx(0.4 + 12 * 0.1)
    assert len(model.asked) == 2 * 25


@pytest.mark.parametrize(
    ("family", "steps"), [("krea2", 25), ("qwen-image", 20), ("z-image", 10), ("flux", 35)]
)
def test_the_empty_text_needs_one_prediction_per_step(family: str, steps: int) -> None:
    model = Numbers({"": 0.4})

    assert rendered(family, model, "") == pytest.approx(0.4)
    assert len(model.asked) == steps


@pytest.mark.parametrize("family", ["z-image", "flux"])
def test_families_without_a_negative_branch_never_ask_for_it(family: str) -> None:
    model = Numbers({"a cat": 0.5})

    assert rendered(family, model, "a cat") == pytest.approx(0.5)


def test_ideogram_guides_by_8_and_from_a_level_of_0_3_by_5_with_a_negative_branch_for_both_texts() -> None:
    model = Numbers({"a cat": 0.5, "": 0.5, None: 0.4})
    model.velocity = lambda latent, sigma, text: model.asked.append((text, sigma)) or float(text is not None)  # type: ignore[method-assign, func-returns-value]
    levels = noise_levels(RULES["ideogram4"], 1024, 1024)
    start = levels[0] * 3 + (1 - levels[0]) * PICTURE
    late = next(level for level in levels if level <= 0.3)

    for text in ("a cat", ""):
        model.asked.clear()
        assert rendered("ideogram4", model, text) == pytest.approx(start - 8 * (levels[0] - late) - 5 * late)
        assert [asked for asked, _ in model.asked] == [text, None] * 22


def test_the_sampler_of_flux_is_of_second_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def error(steps: int) -> float:
        levels = [math.exp(-step * math.log(4.0) / steps) for step in range(steps + 1)]
        rules = plain_rules(monkeypatch, levels, second_order=True)
        model = Numbers({})
        # The clean value is the level itself: from 3 at level 1 the exact curve is level x (3 - log(level)).
        model.velocity = lambda latent, sigma, text: (latent - sigma) / sigma  # type: ignore[method-assign]
        return abs(float(render(model, rules, (0.0, 16, 16), 3, "")) - 0.25 * (3 + math.log(4.0)))  # type: ignore[arg-type]

    assert error(32) < 1e-3
    assert 3.0 < error(16) / error(32) < 5.0
