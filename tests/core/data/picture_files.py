"""Small pictures of every kind, and zips of them."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path


def png(width: int = 128, height: int = 96) -> bytes:
    """A whole PNG of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress((b"\0" + b"\x7f" * 3 * width) * height)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def jpeg(width: int = 128, height: int = 96, before: int = 0) -> bytes:
    """The headers of a JPEG, with `before` bytes of profiles in front of its size."""
    extra = b"".join(
        b"\xff\xe2" + struct.pack(">H", min(left, 60_000) + 2) + b"p" * min(left, 60_000)
        for left in range(before, 0, -60_000)
    )
    frame = b"\xff\xff\xc2" + struct.pack(">HBHHB", 11, 8, height, width, 1) + b"\1\x11\0"
    return b"\xff\xd8\xff\xe0\x00\x04JF" + extra + frame + b"\xff\xda\x00\x02data\xff\xd9"


def webp(width: int = 128, height: int = 96, kind: bytes = b"VP8 ") -> bytes:
    data = {
        b"VP8 ": b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", width, height),
        b"VP8L": b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14),
        b"VP8X": b"\0\0\0\0" + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little"),
    }[kind]
    body = b"WEBP" + kind + struct.pack("<I", len(data)) + data + b"\0" * 8
    return b"RIFF" + struct.pack("<I", len(body)) + body


def bmp(width: int = 128, height: int = 96) -> bytes:
    return b"BM" + struct.pack("<IHHIIii", 54, 0, 0, 54, 40, width, -height) + b"\0" * 28


def zip_bytes(files: Mapping[str, bytes], how: int = zipfile.ZIP_DEFLATED) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", how) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


def make_zip(path: Path, files: Mapping[str, bytes], how: int = zipfile.ZIP_DEFLATED) -> Path:
    path.write_bytes(zip_bytes(files, how))
    return path
