"""Zip files of pictures with captions: inspect them without unpacking, or unpack them under numbered names.

Flat, numbered names avoid every problem that names cause: paths that climb out, a nested directory (kohya
finds nothing then and does not say so), `a.png` beside `a.jpg`, upper-case suffixes, odd characters.
Format and size come from the first bytes and nothing is decoded; only PNG, JPEG, WebP and BMP, which
every image trainer reads.
"""

from __future__ import annotations

import io
import posixpath
import re
import struct
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zipfile import ZipInfo

from core.data.archives import ARCHIVE_LIMITS, Archive, BadArchive, BadEntry, quoted_name, unusable_reason

#: How far into a JPEG its size may be: behind embedded profiles and thumbnails.
MAX_HEADER = 4 * 1024 * 1024

_PNG = b"\x89PNG\r\n\x1a\n"
#: JPEG's start-of-frame markers; C4, C8 and CC in between are something else.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
#: JPEG's markers without a length.
_BARE = frozenset({0x01, *range(0xD0, 0xD9)})


class PictureFormat(StrEnum):
    PNG = "png"
    JPEG = "jpg"
    WEBP = "webp"
    BMP = "bmp"


class PictureInfo(NamedTuple):
    kind: PictureFormat
    width: int
    height: int


def read_picture_info(file: BinaryIO) -> PictureInfo | None:
    """Read forward from the beginning; None for anything but a picture with a complete header."""
    try:
        info = _read_header(file)
    except (struct.error, IndexError):
        return None
    return info if info and info.width > 0 and info.height > 0 else None


def _read_header(file: BinaryIO) -> PictureInfo | None:
    head = file.read(32)
    if head.startswith(_PNG) and head[12:16] == b"IHDR":
        return PictureInfo(PictureFormat.PNG, *struct.unpack(">II", head[16:24]))
    if head.startswith(b"\xff\xd8"):
        return _jpeg(_ForwardReader(file, head[2:]))
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP" and len(head) >= 30:
        return _webp(head)
    if head.startswith(b"BM") and struct.unpack("<I", head[14:18])[0] >= 40:
        width, height = struct.unpack("<ii", head[18:26])
        return PictureInfo(PictureFormat.BMP, width, abs(height))  # a negative height means "from the top"
    return None


def _webp(head: bytes) -> PictureInfo | None:
    chunk, data = head[12:16], head[20:]
    if chunk == b"VP8X":
        return PictureInfo(PictureFormat.WEBP, _u24(data[4:7]) + 1, _u24(data[7:10]) + 1)
    if chunk == b"VP8L" and data[0] == 0x2F:
        (bits,) = struct.unpack("<I", data[1:5])
        return PictureInfo(PictureFormat.WEBP, (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if chunk == b"VP8 " and data[3:6] == b"\x9d\x01\x2a":
        width, height = struct.unpack("<HH", data[6:10])
        return PictureInfo(PictureFormat.WEBP, width & 0x3FFF, height & 0x3FFF)
    return None


def _u24(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _jpeg(file: _ForwardReader) -> PictureInfo | None:
    while file.used < MAX_HEADER:
        if file.take(1) != b"\xff":
            return None
        marker = 0xFF
        while marker == 0xFF:  # any number of them may precede a marker
            (marker,) = file.take(1)
        if marker in _BARE:
            continue
        (length,) = struct.unpack(">H", file.take(2))
        if marker in _FRAMES:
            height, width = struct.unpack(">xHH", file.take(5))
            return PictureInfo(PictureFormat.JPEG, width, height)
        if marker in (0xD9, 0xDA) or length < 2:  # the data begins, or the end comes, without a frame
            return None
        file.take(length - 2)
    return None


class _ForwardReader:
    """Reads a file forward after its first bytes were taken."""

    def __init__(self, file: BinaryIO, first: bytes) -> None:
        self._file = file
        self._first = first
        self.used = 0

    def take(self, count: int) -> bytes:
        data, self._first = self._first[:count], self._first[count:]
        while len(data) < count:
            more = self._file.read(count - len(data))
            if not more:
                raise IndexError("the file ends in its header")
            data += more
        self.used += count
        return data


PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
CAPTION_SUFFIXES = (".txt", ".caption")
#: Decoding more would take gigabytes.
MAX_PIXELS = 100_000_000
#: A smaller side ends kohya's trainer with a division by zero. The evaluation enlarges any picture.
MIN_SIDE = 64
MAX_CAPTION = 256 * 1024
#: Files that are left out and named one by one in the notes.
_NAMED_FILES = 10

#: Left behind by operating systems.
_SYSTEM_FILES = re.compile(r"(^|/)(__MACOSX/|\._|\.DS_Store$|Thumbs\.db$|desktop\.ini$)", re.IGNORECASE)


class PicturePair(NamedTuple):
    """A picture and its caption, by name: in the zip, or in the directory that it was unpacked into."""

    image: str
    caption: str | None
    picture: PictureInfo


@dataclass
class PictureZipContents:
    pairs: list[PicturePair] = field(default_factory=list)
    #: Names in the zip, and why they are not used.
    skipped: list[tuple[str, str]] = field(default_factory=list)
    #: Of the unpacked pairs.
    bytes: int = 0

    @property
    def captioned(self) -> int:
        return sum(pair.caption is not None for pair in self.pairs)

    def notes(self) -> list[str]:
        """Remarks on a zip that can be used."""
        notes = [f"{quoted_name(name)} is left out: {why}" for name, why in self.skipped[:_NAMED_FILES]]
        if len(self.skipped) > _NAMED_FILES:
            notes.append(f"{len(self.skipped) - _NAMED_FILES} more files are left out")
        if self.captioned < len(self.pairs):
            notes.append(f"{len(self.pairs) - self.captioned} of {len(self.pairs)} pictures have no caption")
        return notes


def inspect_picture_zip(path: Path) -> PictureZipContents:
    """Every file is read and checked, none decoded. `BadArchive` when no picture can be trained on."""
    with Archive(path) as archive:
        return _PairFinder(archive).contents


def unpack_pictures(path: Path, directory: Path, *, verbatim: bool = False) -> PictureZipContents:
    """Write the pairs into `directory`, which must be new or empty, as `00001.png` and `00001.txt`.

    Captions become one line of UTF-8, the only form that every trainer reads completely; with `verbatim` they
    stay as they are, which is how evaluators read them. The pairs returned name the files written. When this
    raises, the caller removes what was written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise BadArchive(f"{directory} is not empty: pictures are unpacked into a new directory")
    # Every byte is read twice: to inspect it and to write it.
    with Archive(path, replace(ARCHIVE_LIMITS, all_bytes=2 * ARCHIVE_LIMITS.all_bytes)) as archive:
        finder = _PairFinder(archive, verbatim)
        for number, (entry, caption, picture) in enumerate(finder.pairs, 1):
            image, text = f"{number:05}.{picture.kind}", f"{number:05}.txt" if caption else None
            with (directory / image).open("xb") as file:
                file.writelines(archive.read_chunks(entry))
            if text:
                caption = caption if verbatim else f"{caption}\n"
                (directory / text).write_text(caption, encoding="utf-8", newline="")
            finder.contents.pairs[number - 1] = PicturePair(image, text, picture)
        return finder.contents


class _PairFinder:
    """Pairs pictures and captions of an archive by directory and name, without the suffix."""

    def __init__(self, archive: Archive, verbatim: bool = False) -> None:
        self.contents = PictureZipContents()
        #: In the order of the pairs: the picture's entry, the caption's text, the picture.
        self.pairs: list[tuple[ZipInfo, str, PictureInfo]] = []
        self._archive, self._verbatim = archive, verbatim
        images, captions = self._sorted()
        for stem, entry in images.items():
            self._add_pair(entry, captions.pop(stem, None))
        for entry in captions.values():
            self._skip(entry, "it belongs to no picture")
        if not self.pairs:
            raise BadArchive(self._no_pairs_text())

    def _sorted(self) -> tuple[dict[str, ZipInfo], dict[str, ZipInfo]]:
        images: dict[str, ZipInfo] = {}
        captions: dict[str, ZipInfo] = {}
        for entry in self._archive.entries:
            stem, suffix = posixpath.splitext(entry.filename.replace("\\", "/").casefold())
            if entry.is_dir() or _SYSTEM_FILES.search(entry.filename):
                continue
            kind = images if suffix in PICTURE_SUFFIXES else captions
            if why := unusable_reason(entry):
                self._skip(entry, why)
            elif suffix not in PICTURE_SUFFIXES + CAPTION_SUFFIXES:
                self._skip(entry, "neither a picture nor a caption")
            elif stem in kind:
                self._skip(entry, "another file has the same name")
            else:
                kind[stem] = entry
        return images, captions

    def _add_pair(self, entry: ZipInfo, caption: ZipInfo | None) -> None:
        try:
            picture = self._picture(entry)
            text = self._text(caption) if caption else ""
        except BadEntry as error:
            self._skip(entry, str(error))
            return
        if picture is None:
            self._skip(entry, "its header is not a picture's")
        elif picture.width * picture.height > MAX_PIXELS:
            self._skip(entry, f"{picture.width}×{picture.height} is too large")
        elif not self._verbatim and min(picture.width, picture.height) < MIN_SIDE:
            self._skip(
                entry, f"{picture.width}×{picture.height} is too small, {MIN_SIDE} a side is the least"
            )
        else:
            self.pairs.append((entry, text, picture))
            name = caption.filename if caption and text else None
            self.contents.pairs.append(PicturePair(entry.filename, name, picture))
            self.contents.bytes += entry.file_size + len(text)

    def _picture(self, entry: ZipInfo) -> PictureInfo | None:
        """Read the header; the rest is read as well, to find damage now and not in the training."""
        head = bytearray()
        for chunk in self._archive.read_chunks(entry):
            if len(head) < MAX_HEADER:
                head += chunk
        return read_picture_info(io.BytesIO(head))

    def _text(self, entry: ZipInfo) -> str:
        """The caption on one line, unless it is to stay as it is; "" when it is far too long."""
        if entry.file_size > MAX_CAPTION:
            return ""
        data = b"".join(self._archive.read_chunks(entry))
        line = " ".join(data.decode("utf-8-sig", errors="replace").replace("\0", " ").split())
        return data.decode("utf-8", errors="replace") if self._verbatim and line else line

    def _skip(self, entry: ZipInfo, why: str) -> None:
        self.contents.skipped.append((entry.filename, why))

    def _no_pairs_text(self) -> str:
        left = self.contents.skipped
        if not left:
            return "the zip holds no pictures"
        more = f", and {len(left) - 1} more" if len(left) > 1 else ""
        name, reason = left[0]
        return f"no picture in the zip can be trained on: {quoted_name(name)} is left out ({reason}){more}"
