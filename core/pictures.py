"""A picture's kind and size from its first bytes; nothing is decoded.

Only what every image trainer reads: PNG, JPEG, WebP and BMP.
"""

from __future__ import annotations

import struct
from enum import StrEnum
from typing import BinaryIO, NamedTuple

#: How far into a JPEG its size may stand: behind embedded profiles and thumbnails.
MAX_HEADER = 4 * 1024 * 1024

_PNG = b"\x89PNG\r\n\x1a\n"
#: JPEG's start-of-frame markers; C4, C8 and CC in between are something else.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
#: JPEG's markers without a length.
_BARE = frozenset({0x01, *range(0xD0, 0xD9)})


class Kind(StrEnum):
    PNG = "png"
    JPEG = "jpg"
    WEBP = "webp"
    BMP = "bmp"


class Picture(NamedTuple):
    kind: Kind
    width: int
    height: int


def picture_of(file: BinaryIO) -> Picture | None:
    """Read forward from the beginning; None for what is no picture, or one that breaks off in its header."""
    try:
        found = _read(file)
    except (struct.error, IndexError):
        return None
    return found if found and found.width > 0 and found.height > 0 else None


def _read(file: BinaryIO) -> Picture | None:
    head = file.read(32)
    if head.startswith(_PNG) and head[12:16] == b"IHDR":
        return Picture(Kind.PNG, *struct.unpack(">II", head[16:24]))
    if head.startswith(b"\xff\xd8"):
        return _jpeg(_Forward(file, head[2:]))
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP" and len(head) >= 30:
        return _webp(head)
    if head.startswith(b"BM") and struct.unpack("<I", head[14:18])[0] >= 40:
        width, height = struct.unpack("<ii", head[18:26])
        return Picture(Kind.BMP, width, abs(height))  # a negative height only says "from the top"
    return None


def _webp(head: bytes) -> Picture | None:
    chunk, data = head[12:16], head[20:]
    if chunk == b"VP8X":
        return Picture(Kind.WEBP, _u24(data[4:7]) + 1, _u24(data[7:10]) + 1)
    if chunk == b"VP8L" and data[0] == 0x2F:
        (bits,) = struct.unpack("<I", data[1:5])
        return Picture(Kind.WEBP, (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if chunk == b"VP8 " and data[3:6] == b"\x9d\x01\x2a":
        width, height = struct.unpack("<HH", data[6:10])
        return Picture(Kind.WEBP, width & 0x3FFF, height & 0x3FFF)
    return None


def _u24(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _jpeg(file: _Forward) -> Picture | None:
    while file.used < MAX_HEADER:
        if file.take(1) != b"\xff":
            return None
        marker = 0xFF
        while marker == 0xFF:  # any number of them may stand before a marker
            (marker,) = file.take(1)
        if marker in _BARE:
            continue
        (length,) = struct.unpack(">H", file.take(2))
        if marker in _FRAMES:
            height, width = struct.unpack(">xHH", file.take(5))
            return Picture(Kind.JPEG, width, height)
        if marker in (0xD9, 0xDA) or length < 2:  # the data begins, or the end comes, without a frame
            return None
        file.take(length - 2)
    return None


class _Forward:
    """A file after its first bytes were taken, read forward."""

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
