"""The image engines' own step output, as far as it says something: their progress bars are all there is.

sd-scripts:   steps:   3%|▎  | 48/1600 [01:02<33:20,  1.29s/it, avr_loss=0.123]
ai-toolkit:   last:   1%|  | 12/2000 [00:30<1:22:00,  2.48s/it, lr: 1.0e-04 loss: 3.456e-01]

Bars that count something else (files, latents, epochs) look the same but for their names and totals.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

#: Begins with what few lines have: a pattern that began with the name took minutes over a long odd line.
_BAR = re.compile(r"\d{1,3}%\|[^|]*\|\s*(?P<step>\d{1,9})/(?P<total>\d{1,9})\s*\[(?P<rest>[^\]]*)")
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)"
_LOSS = re.compile(rf"(?:avr_loss|loss)\s*[=:]\s*({_NUMBER})", re.IGNORECASE)
_RATE = re.compile(rf"\blr\s*[=:]\s*({_NUMBER})", re.IGNORECASE)


class Step(NamedTuple):
    step: int
    total: int
    loss: float | None = None
    lr: float | None = None


def step_of(line: str, total: int) -> Step | None:
    """What a line says of the training's steps, of which there are `total`; None for every other line."""
    found = _BAR.search(line)
    if found is None or int(found["total"]) != total:
        return None
    # The latents of as many pictures as there are steps: a bar of the training says what it has learned, or
    # is called by the engine's word for it.
    loss, rate = _number(_LOSS, found["rest"]), _number(_RATE, found["rest"])
    name = line[: found.start()].rpartition("|")[2].strip().removesuffix(":")
    if loss is None and name != "steps":
        return None
    return Step(int(found["step"]), total, loss, rate)


def _number(pattern: re.Pattern[str], text: str) -> float | None:
    found = pattern.search(text)
    return float(found[1]) if found else None


def is_broken(step: Step) -> bool:
    return step.loss is not None and not math.isfinite(step.loss)
