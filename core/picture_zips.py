"""Zips of pictures with captions: looked into without unpacking, and unpacked under names of our own.

Flat, numbered names end all trouble that names can make: a path that climbs out, one folder too many (kohya's
trainer finds nothing then, and says so to nobody), `a.png` beside `a.jpg`, endings in capitals, odd letters.
"""

from __future__ import annotations

import io
import posixpath
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipInfo

from core.archives import LIMITS, Archive, BadArchive, BadEntry, Limits, shown, unfit
from core.pictures import MAX_HEADER, Picture, picture_of

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
CAPTIONS = (".txt", ".caption")
#: Decoding more would take gigabytes.
MAX_PIXELS = 100_000_000
#: A smaller side ends kohya's trainer with a division by zero.
MIN_SIDE = 64
MAX_CAPTION = 256 * 1024

#: Left by operating systems, and meant for nobody.
_LITTER = re.compile(r"(^|/)(__MACOSX/|\._|\.DS_Store$|Thumbs\.db$|desktop\.ini$)", re.IGNORECASE)


class Pair(NamedTuple):
    """A picture and its caption, by name: inside the zip, or in the folder that it was unpacked into."""

    image: str
    caption: str | None
    picture: Picture


@dataclass
class Contents:
    pairs: list[Pair] = field(default_factory=list)
    #: Names inside the zip, and why they are not used.
    left_out: list[tuple[str, str]] = field(default_factory=list)
    #: Of the pairs, unpacked.
    bytes: int = 0

    @property
    def captioned(self) -> int:
        return sum(pair.caption is not None for pair in self.pairs)

    def notes(self, most: int = 10) -> list[str]:
        """What an operator may want to know of a zip that is fine otherwise."""
        found = [f"{shown(name)} is left out: {why}" for name, why in self.left_out[:most]]
        if len(self.left_out) > most:
            found.append(f"{len(self.left_out) - most} more files are left out")
        if self.captioned < len(self.pairs):
            found.append(f"{len(self.pairs) - self.captioned} of {len(self.pairs)} pictures have no caption")
        return found


def look_into(path: Path, limits: Limits = LIMITS) -> Contents:
    """Every file is read and checked, none decoded. `BadArchive` when no picture can be trained on."""
    with Archive(path, limits) as archive:
        return _Finder(archive).contents


def unpack(path: Path, folder: Path, limits: Limits = LIMITS) -> Contents:
    """Write the pairs into `folder`, which must be new or empty, as `00001.png` and `00001.txt`.

    Captions come out as UTF-8 on one line, the only form that every trainer reads whole. The pairs returned
    name the files written. What is half done when this raises is the caller's to remove.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise BadArchive(f"{folder} is not empty: pictures are unpacked into a folder of their own")
    # What is looked at and what is written counts twice.
    doubled = Limits(
        limits.entries, limits.table_bytes, limits.file_bytes, 2 * limits.all_bytes, limits.ratio
    )
    with Archive(path, doubled) as archive:
        finder = _Finder(archive)
        for number, (entry, caption, picture) in enumerate(finder.found, 1):
            image, text = f"{number:05}.{picture.kind}", f"{number:05}.txt" if caption else None
            with (folder / image).open("xb") as file:
                file.writelines(archive.pieces(entry))
            if text:
                (folder / text).write_text(f"{caption}\n", encoding="utf-8")
            finder.contents.pairs[number - 1] = Pair(image, text, picture)
        return finder.contents


class _Finder:
    """Pairs pictures and captions of an archive by folder and name, endings aside."""

    def __init__(self, archive: Archive) -> None:
        self.contents = Contents()
        #: In the order of the pairs: the picture's entry, the caption's text, the picture.
        self.found: list[tuple[ZipInfo, str, Picture]] = []
        self._archive = archive
        images, captions = self._sorted()
        for stem, entry in images.items():
            self._take(entry, captions.pop(stem, None))
        for entry in captions.values():
            self._leave(entry, "it belongs to no picture")
        if not self.found:
            raise BadArchive(self._nothing())

    def _sorted(self) -> tuple[dict[str, ZipInfo], dict[str, ZipInfo]]:
        images: dict[str, ZipInfo] = {}
        captions: dict[str, ZipInfo] = {}
        for entry in self._archive.entries:
            stem, suffix = posixpath.splitext(entry.filename.replace("\\", "/").casefold())
            if entry.is_dir() or _LITTER.search(entry.filename):
                continue
            kind = images if suffix in PICTURES else captions
            if why := unfit(entry):
                self._leave(entry, why)
            elif suffix not in PICTURES + CAPTIONS:
                self._leave(entry, "neither a picture nor a caption")
            elif stem in kind:
                self._leave(entry, "another file has the same name")
            else:
                kind[stem] = entry
        return images, captions

    def _take(self, entry: ZipInfo, caption: ZipInfo | None) -> None:
        try:
            picture = self._picture(entry)
            text = self._text(caption) if caption else ""
        except BadEntry as error:
            self._leave(entry, str(error))
            return
        if picture is None:
            self._leave(entry, "its header is no picture's")
        elif picture.width * picture.height > MAX_PIXELS:
            self._leave(entry, f"{picture.width}×{picture.height} is too large")
        elif min(picture.width, picture.height) < MIN_SIDE:
            self._leave(
                entry, f"{picture.width}×{picture.height} is too small, {MIN_SIDE} a side is the least"
            )
        else:
            self.found.append((entry, text, picture))
            name = caption.filename if caption and text else None
            self.contents.pairs.append(Pair(entry.filename, name, picture))
            self.contents.bytes += entry.file_size + len(text)

    def _picture(self, entry: ZipInfo) -> Picture | None:
        """From the beginning; but all of it is read, to find damage now and not in the training."""
        head = bytearray()
        for piece in self._archive.pieces(entry):
            if len(head) < MAX_HEADER:
                head += piece
        return picture_of(io.BytesIO(head))

    def _text(self, entry: ZipInfo) -> str:
        """On one line; nothing when it is far too long to be a caption."""
        if entry.file_size > MAX_CAPTION:
            return ""
        data = b"".join(self._archive.pieces(entry))
        return " ".join(data.decode("utf-8-sig", errors="replace").replace("\0", " ").split())

    def _leave(self, entry: ZipInfo, why: str) -> None:
        self.contents.left_out.append((entry.filename, why))

    def _nothing(self) -> str:
        left = self.contents.left_out
        if not left:
            return "the zip holds no pictures"
        more = f", and {len(left) - 1} more" if len(left) > 1 else ""
        return (
            f"no picture in the zip can be trained on: {shown(left[0][0])} is left out ({left[0][1]}){more}"
        )
