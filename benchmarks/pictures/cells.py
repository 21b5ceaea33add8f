"""A cell is one style with some pictures to train on, and unseen ones of the same style to be scored by."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

#: Pixels of a picture. A step's time is that of its calls, so larger ones would only learn more slowly.
SIDE = 64
#: Unseen pictures of a cell, and noises for each of the 16 bands: the evaluator has one to five and 16.
UNSEEN, NOISES = 5, 2
#: Those whose small models are quick: z-image's layers cannot be narrow, flux's texts are long.
FAMILIES = ("krea2", "qwen-image", "ideogram4")
#: Where the field ends a training, as a share of the clock for each picture: its winners' steps over those
#: that fit into the task's hours on an H100 (45 of 2,850, 29 of 1,213, 20 of 1,780).
FIELD_SHARE = {"krea2": 0.0158, "qwen-image": 0.0239, "ideogram4": 0.0112}
#: Pictures to train on, by the number of the cell.
PICTURES = (10, 20, 40)


@dataclass(frozen=True)
class PictureCell:
    family: str
    seed: int
    pictures: int

    def __str__(self) -> str:
        return f"{self.family}-{self.pictures}-{self.seed}"

    def write(self, folder: Path) -> None:
        """Write its pictures. Needs an imaging library."""
        from benchmarks.pictures.drawings import Style, write

        style = Style.of(self.seed)
        write(folder / "pictures", f"{self} seen", style, self.pictures, SIDE)
        write(folder / "unseen", f"{self} unseen", style, UNSEEN, SIDE)


@dataclass(frozen=True)
class WorkOrder:
    """Work on one family: its cells and how long each training is. Seconds are those of the CPU."""

    family: str
    cells: tuple[PictureCell, ...]
    checkout: str
    folder: str
    bases: str
    #: Of a base's training, of each side's, and of a training that goes on past its optimum; 0: none.
    base_s: float
    seconds: float
    long_s: float
    #: On our rates, as so small models learn at higher ones; found for the peer.
    scale: float
    peer_rates: tuple[float, ...]
    ours: bool = True

    @classmethod
    def read(cls, text: str) -> Self:
        given = json.loads(text)
        cells = tuple(PictureCell(**cell) for cell in given.pop("cells"))
        return cls(**{**given, "cells": cells, "peer_rates": tuple(given["peer_rates"])})

    def write(self) -> str:
        return json.dumps(asdict(self))
