"""The validators' score of a LoRA of pictures: pixels, seeds, noise levels and weights.

They render each test picture again with ComfyUI, picture to picture, with its caption and with the empty
text, and compare pixels. This is arithmetic alone; `pictures` runs it on a model. The settings of a
family are in its record (core/models/image_families.py).

Checked against the validators' graphs of July 2026 and ComfyUI's own samplers. Two things differ from theirs:
they render with fp8 weights where the engine has its own precision, and ideogram4's negative branch is there
a second checkpoint, here the base with ai-toolkit's adapter for that branch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import NormalDist

from core.models.image_families import NoiseSchedule, RenderRules

#: The long side of what is compared; both sides become multiples of `STEP` pixels.
LONG_SIDE, STEP = 1024, 16
MASTER_SEED = 42
CAPTION_SHARE, EMPTY_SHARE = 0.25, 0.75
#: Ideogram's noise levels: mean and spread of their logits at 512 x 512, and where they are cut off.
IDEOGRAM_MU, IDEOGRAM_STD, LOGSNR_MIN, LOGSNR_MAX = 0.5, 1.75, -15.0, 18.0


class NotScored(Exception):
    """A job, engine or file that cannot be scored; the text is the report's reason."""


def noise_levels(rules: RenderRules, width: int, height: int) -> list[float]:
    """Return the noise levels of a render from the first to 0."""
    if rules.noise is NoiseSchedule.IDEOGRAM:
        return _ideogram_levels(rules, width, height)
    return _simple_levels(rules) if rules.noise is NoiseSchedule.SIMPLE else _uniform_levels(rules)


def seed_list(rules: RenderRules, wanted: int) -> list[int]:
    """Return the validators' first seeds, not more than they use."""
    if rules.fixed_seed is not None:
        return [rules.fixed_seed]
    return seeds(min(max(wanted, 1), rules.seeds))


def seeds(count: int) -> list[int]:
    """Return the validators' seeds, the same for every picture and miner."""
    generator = random.Random(MASTER_SEED)  # noqa: S311 - the validators' stream, nothing secret
    return [generator.randint(0, 2**32 - 1) for _ in range(count)]


def scaled_size(width: int, height: int) -> tuple[int, int]:
    """Return the size before the cut: the long side is 1,024."""
    if width > height:
        return LONG_SIDE, int((height / width) * LONG_SIDE)
    return int((width / height) * LONG_SIDE), LONG_SIDE


def crop_box(width: int, height: int) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of a scaled picture's middle, in multiples of 16."""
    across, down = width // STEP * STEP, height // STEP * STEP
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


def task_loss(with_caption: Sequence[float], without_caption: Sequence[float]) -> float:
    """Return the loss from the means of each picture."""
    return CAPTION_SHARE * mean(with_caption) + EMPTY_SHARE * mean(without_caption)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _simple_levels(rules: RenderRules) -> list[float]:
    """Return ComfyUI's `simple` levels: evenly spaced entries of the model's table, in whole places."""
    total = int(rules.steps / rules.denoise)
    places = [rules.entries - int(place * (rules.entries / total)) for place in range(total)]
    levels = [shifted(place / rules.entries, rules.shift) for place in places]
    return [*levels, 0.0][-(rules.steps + 1) :]


def _uniform_levels(rules: RenderRules) -> list[float]:
    """Return ComfyUI's `sgm_uniform` levels, whose last step starts above the table's lowest entry."""
    total = int(rules.steps / rules.denoise)
    lowest = shifted(1 / rules.entries, rules.shift)
    times = [1.0 + (lowest - 1.0) * place / total for place in range(total)]
    return [*(shifted(time, rules.shift) for time in times), 0.0][-(rules.steps + 1) :]


def _ideogram_levels(rules: RenderRules, width: int, height: int) -> list[float]:
    """Return logits of a normal distribution, higher for larger pictures: the last share of the steps."""
    steps = rules.steps
    centre = IDEOGRAM_MU + 0.5 * math.log((width * height) / (512 * 512))
    low, high = (1.0 - 1.0 / (1.0 + math.exp(0.5 * bound)) for bound in (LOGSNR_MIN, LOGSNR_MAX))
    normal = NormalDist(centre, IDEOGRAM_STD)
    inner = [1.0 / (1.0 + math.exp(-normal.inv_cdf(1.0 - place / steps))) for place in range(1, steps)]
    clamped = [min(max(level, low), high) for level in (1.0, *inner)]
    return [*clamped, 0.0][-(round(steps * rules.denoise) + 1) :]


def shifted(time: float, shift: float) -> float:
    """Shift a time towards high noise."""
    return shift * time / (1.0 + (shift - 1.0) * time)
