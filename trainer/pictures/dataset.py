"""The pictures of a task: read, prepared as the evaluation prepares them, split, and put into an order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from core.data.pictures import PICTURE_SUFFIXES
from core.domain.tournament_rules import BANDS
from trainer.errors import BadData
from trainer.pictures.choice import held_out_count
from trainer.pictures.measure import picture_digest, prepared
from trainer.pictures.stack import TrainedPicture


class PreparedPicture(NamedTuple):
    name: str
    digest: str
    picture: Image.Image
    #: As it is in its file; empty where there is none.
    caption: str


def read_pictures(folder: Path, note: Callable[[str, str], None]) -> list[PreparedPicture]:
    """All that can be used, by name. `note` gets a line for what cannot; `BadData` if nothing is left."""
    pictures: dict[str, PreparedPicture] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() not in PICTURE_SUFFIXES or not path.is_file():
            continue
        name = str(path.relative_to(folder))
        try:
            with Image.open(path) as opened:
                picture = prepared(opened)
        except Exception as error:  # noqa: BLE001 - a decoder may fail in any way on a broken file
            note("pictures", f"{name} is left out: {error}")
            continue
        digest = picture_digest(picture)
        if digest in pictures:
            note("pictures", f"{name} is left out: it is the same picture as {pictures[digest].name}")
        else:
            pictures[digest] = PreparedPicture(name, digest, picture, _caption(path))
    if not pictures:
        raise BadData(f"{folder} has no picture to train on")
    without = [picture.name for picture in pictures.values() if not picture.caption]
    if without:
        note(
            "pictures",
            f"{len(without)} of {len(pictures)} have no caption, the first {without[0]}: they are trained"
            " with the empty text",
        )
    return list(pictures.values())


def _caption(picture: Path) -> str:
    try:
        text = picture.with_suffix(".txt").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""
    return text if text.strip() else ""


class PictureSplit(NamedTuple):
    trained: list[TrainedPicture]
    held_out: list[TrainedPicture]


def split(pictures: Sequence[TrainedPicture], share: float, least: int) -> PictureSplit:
    """Hold out the same ones each time, whatever their names; first those with captions, as the evaluation's
    are."""
    count = held_out_count(len(pictures), share, least)
    ordered = sorted(pictures, key=lambda picture: (not picture.caption, picture.digest))
    return PictureSplit(ordered[count:], ordered[:count])


class TrainingCase(NamedTuple):
    picture: TrainedPicture
    band: int
    text: str


def training_cases(pictures: Sequence[TrainedPicture], seed: int) -> Iterator[TrainingCase]:
    """Without end: each picture in each band once a pass, shuffled; in two passes with both texts."""
    shuffle = random.Random(seed).shuffle  # noqa: S311 - no secret
    pairs = [(picture, band) for picture in pictures for band in range(BANDS)]
    captioned = [at % 2 == 0 for at in range(len(pairs))]
    shuffle(captioned)
    while True:
        cases = [
            TrainingCase(picture, band, picture.caption if with_text else "")
            for (picture, band), with_text in zip(pairs, captioned, strict=True)
        ]
        shuffle(cases)
        yield from cases
        captioned = [not with_text for with_text in captioned]
