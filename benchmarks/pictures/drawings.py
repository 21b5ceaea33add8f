"""Drawn pictures with captions: a plain kind that bases are trained on, and styles to adapt them to.

A picture has one or two shapes on a ground; the caption says which, in what colours and where. A style is
drawn from a seed: other colours, hatching, outlines, a shade across the picture.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from PIL import Image, ImageDraw

COLOURS = {
    "red": (205, 50, 45),
    "green": (50, 150, 70),
    "blue": (45, 80, 190),
    "yellow": (235, 205, 60),
    "white": (240, 240, 235),
    "grey": (120, 120, 125),
}
SHAPES = ("circle", "square", "triangle")
PLACES = {"left": (0.3, 0.5), "right": (0.7, 0.5), "top": (0.5, 0.3), "bottom": (0.5, 0.7)}
#: Pixels that a picture is drawn with; smaller ones are shrunk from it.
DRAWN = 256
Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Style:
    """Changes of a plain drawing; the default changes nothing."""

    turn: int = 0
    fade: float = 0.0
    hatch: int = 0
    angle: float = 0.0
    outline: int = 0
    shade: float = 0.0

    @classmethod
    def of(cls, seed: int) -> Self:
        drawn = random.Random(f"style {seed}")
        return cls(
            turn=drawn.choice((1, 2)),
            fade=drawn.uniform(0.2, 0.6),
            hatch=drawn.randrange(14, 30),
            angle=drawn.uniform(0, math.pi),
            outline=drawn.randrange(4, 12),
            shade=drawn.uniform(0.2, 0.6),
        )

    def colour(self, plain: Colour) -> Colour:
        turned = plain[self.turn :] + plain[: self.turn]
        grey = sum(turned) / 3
        red, green, blue = (round(part + (grey - part) * self.fade) for part in turned)
        return red, green, blue


PLAIN = Style()


def picture(drawn: random.Random, style: Style = PLAIN, side: int = DRAWN) -> tuple[Image.Image, str]:
    """A picture with its caption."""
    ground, *colours = drawn.sample(sorted(COLOURS), 3)
    image = Image.new("RGB", (DRAWN, DRAWN), style.colour(COLOURS[ground]))
    canvas = ImageDraw.Draw(image)
    said = []
    for place, colour in zip(drawn.sample(sorted(PLACES), drawn.choice((1, 2))), colours, strict=False):
        shape = drawn.choice(SHAPES)
        centre = [(part + drawn.uniform(-0.05, 0.05)) * DRAWN for part in PLACES[place]]
        _draw(canvas, shape, centre, drawn.uniform(0.12, 0.22) * DRAWN, style, COLOURS[colour])
        said.append(f"a {colour} {shape} on the {place}")
    _finish(image, style)
    image = image.resize((side, side), Image.Resampling.LANCZOS)
    return image, f"{' and '.join(said)}, before {ground}"


def _draw(
    canvas: ImageDraw.ImageDraw, shape: str, centre: list[float], radius: float, style: Style, colour: Colour
) -> None:
    x, y = centre
    box = (x - radius, y - radius, x + radius, y + radius)
    look = {"fill": style.colour(colour), "outline": (15, 15, 15) if style.outline else None}
    if shape == "circle":
        canvas.ellipse(box, width=style.outline, **look)
    elif shape == "square":
        canvas.rectangle(box, width=style.outline, **look)
    else:
        corners = [(x, y - radius), (x + radius, y + radius), (x - radius, y + radius)]
        canvas.polygon(corners, width=style.outline, **look)


def _finish(image: Image.Image, style: Style) -> None:
    if style.hatch:
        lines = ImageDraw.Draw(image, "RGBA")
        across, along = (math.cos(style.angle), math.sin(style.angle)), 2 * DRAWN
        for step in range(-DRAWN, 2 * DRAWN, style.hatch):
            x, y = step * across[0] + DRAWN / 2, step * across[1] + DRAWN / 2
            aside, ahead = along * across[1], along * across[0]
            lines.line((x - aside, y + ahead, x + aside, y - ahead), fill=(20, 20, 40, 110), width=3)
    if style.shade:
        fall = Image.linear_gradient("L").point(lambda level: round(level * style.shade))
        image.paste(Image.new("RGB", image.size), mask=fall.resize(image.size))


def write(folder: Path, seed: str, style: Style, count: int, side: int) -> None:
    """Write pictures with captions beside them, as trainers and the evaluator read them."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = random.Random(seed)
    for at in range(count):
        image, caption = picture(drawn, style, side)
        image.save(folder / f"{at:02}.png")
        (folder / f"{at:02}.txt").write_text(caption, encoding="utf-8")
