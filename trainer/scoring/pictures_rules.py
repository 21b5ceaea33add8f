"""How validators score a LoRA of pictures: which pixels, which seeds, which noise levels, which weights.

They render each test picture again with ComfyUI, picture to picture, with its caption and with the empty
text, and compare pixels. What is here is arithmetic alone; `pictures_render` runs it on a model.

Checked against the validators' graphs of July 2026 and ComfyUI's own samplers. Two things differ from theirs:
they render with fp8 weights where the engine has its own precision, and ideogram4's negative branch is there
a second checkpoint, here the base with ai-toolkit's adapter for that branch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

#: The long side of what is compared; both sides become multiples of `STEP` pixels.
LONG_SIDE, STEP = 1024, 16
MASTER_SEED = 42
CAPTION_SHARE, EMPTY_SHARE = 0.25, 0.75
#: Ideogram's noise levels: mean and spread of their logits at 512 x 512, and where they are cut off.
IDEOGRAM_MU, IDEOGRAM_STD, LOGSNR_MIN, LOGSNR_MAX = 0.5, 1.75, -15.0, 18.0

Sigmas = Callable[[int, float, int, int], list[float]]


class NotScored(Exception):
    """Something about the job, the engine or a file; its text is the report's reason."""


@dataclass(frozen=True)
class RenderRules:
    """One family's settings. Its noise levels depend on steps, denoise, width and height."""

    steps: int
    guidance: float
    denoise: float
    sigmas: Sigmas
    seeds: int = 10
    #: The graph has a noise of its own and ignores the seed: every render of a picture is the same one.
    fixed_seed: int | None = None
    #: The guidance is an input of the model, not a difference of two predictions.
    embedded: bool = False
    #: The negative branch runs without adapter and text; below the second number the guidance is the first.
    late: tuple[float, float] | None = None
    second_order: bool = False

    def levels(self, width: int, height: int) -> list[float]:
        """The noise levels from the first to 0."""
        return self.sigmas(self.steps, self.denoise, width, height)

    def seed_list(self, wanted: int) -> list[int]:
        """The validators' first seeds, not more than they use."""
        if self.fixed_seed is not None:
            return [self.fixed_seed]
        return seeds(min(max(wanted, 1), self.seeds))


def seeds(count: int) -> list[int]:
    """The same for every picture and every miner."""
    generator = random.Random(MASTER_SEED)  # noqa: S311 - the validators' stream, nothing secret
    return [generator.randint(0, 2**32 - 1) for _ in range(count)]


def scaled_size(width: int, height: int) -> tuple[int, int]:
    """The size before the cut: the long side is 1,024."""
    if width > height:
        return LONG_SIDE, int((height / width) * LONG_SIDE)
    return int((width / height) * LONG_SIDE), LONG_SIDE


def crop_box(width: int, height: int) -> tuple[int, int, int, int]:
    """What remains of a scaled picture: left, top, right, bottom of its middle, in multiples of 16."""
    across, down = width // STEP * STEP, height // STEP * STEP
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


def task_loss(with_caption: Sequence[float], without_caption: Sequence[float]) -> float:
    """From the means of each picture."""
    return CAPTION_SHARE * mean(with_caption) + EMPTY_SHARE * mean(without_caption)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def simple_schedule(shift: float, entries: int = 1000) -> Sigmas:
    """ComfyUI's `simple`: evenly spaced entries of the model's table, in whole places."""

    def levels(steps: int, denoise: float, width: int, height: int) -> list[float]:
        total = int(steps / denoise)
        places = [entries - int(place * (entries / total)) for place in range(total)]
        return [*(shifted(place / entries, shift) for place in places), 0.0][-(steps + 1) :]

    return levels


def uniform_schedule(shift: float, entries: int = 10_000) -> Sigmas:
    """ComfyUI's `sgm_uniform`, whose last step starts above the table's lowest entry."""

    def levels(steps: int, denoise: float, width: int, height: int) -> list[float]:
        total = int(steps / denoise)
        lowest = shifted(1 / entries, shift)
        times = [1.0 + (lowest - 1.0) * place / total for place in range(total)]
        return [*(shifted(time, shift) for time in times), 0.0][-(steps + 1) :]

    return levels


def ideogram_schedule(steps: int, denoise: float, width: int, height: int) -> list[float]:
    """Logits of a normal distribution, higher for larger pictures; of them the last share of the steps."""
    centre = IDEOGRAM_MU + 0.5 * math.log((width * height) / (512 * 512))
    low, high = (1.0 - 1.0 / (1.0 + math.exp(0.5 * bound)) for bound in (LOGSNR_MIN, LOGSNR_MAX))
    normal = NormalDist(centre, IDEOGRAM_STD)
    inner = [1.0 / (1.0 + math.exp(-normal.inv_cdf(1.0 - place / steps))) for place in range(1, steps)]
    clamped = [min(max(level, low), high) for level in (1.0, *inner)]
    return [*clamped, 0.0][-(round(steps * denoise) + 1) :]


def shifted(time: float, shift: float) -> float:
    """More steps at high noise."""
    return shift * time / (1.0 + (shift - 1.0) * time)


#: Flux states its shift as a logarithm, and its table has ten times the entries.
_FLUX_SHIFT = math.exp(1.15)

RULES = {
    "krea2": RenderRules(25, 12.0, 0.80, simple_schedule(_FLUX_SHIFT, 10_000), seeds=5),
    "ideogram4": RenderRules(30, 8.0, 0.75, ideogram_schedule, seeds=5, late=(5.0, 0.3)),
    "qwen-image": RenderRules(20, 8.0, 0.93, simple_schedule(3.0)),
    "z-image": RenderRules(10, 1.0, 0.90, simple_schedule(3.0)),
    "flux": RenderRules(
        35,
        100.0,
        0.75,
        uniform_schedule(_FLUX_SHIFT),
        fixed_seed=18006742449132,
        embedded=True,
        second_order=True,
    ),
}
