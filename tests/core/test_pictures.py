"""A picture's size from its header."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st

from core.pictures import Kind, Picture, picture_of
from tests.core.pictures import bmp, jpeg, png, webp
from tests.doubles.each import each

MADE = {
    "png": (png(), Kind.PNG),
    "jpeg": (jpeg(), Kind.JPEG),
    "jpeg behind a profile": (jpeg(before=300_000), Kind.JPEG),
    "webp": (webp(), Kind.WEBP),
    "lossless webp": (webp(kind=b"VP8L"), Kind.WEBP),
    "extended webp": (webp(kind=b"VP8X"), Kind.WEBP),
    "bmp from the top": (bmp(), Kind.BMP),
}


@each(("data", "kind"), MADE.values())
def test_kind_and_size_stand_in_the_header(data: bytes, kind: Kind) -> None:
    assert picture_of(io.BytesIO(data)) == Picture(kind, 128, 96)


@each(
    "data",
    [
        b"",
        b"not a picture at all, but some text",
        b"GIF89a" + b"\0" * 40,
        png(0, 5),
        png()[:18],
        jpeg()[:16],
        b"\xff\xd8\xff\xda\x00\x02data",
        b"\xff\xd8\xff\xe0\x00\x00",
        b"\xff\xd8no marker",
        webp()[:24],
        jpeg(before=5_000_000),
    ],
)
def test_what_is_no_picture_or_breaks_off_has_none(data: bytes) -> None:
    assert picture_of(io.BytesIO(data)) is None


@given(
    start=st.sampled_from([b"", b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"RIFF1234WEBP", b"BM"]),
    rest=st.binary(max_size=200),
)
def test_bytes_of_any_kind_are_a_picture_with_a_size_or_none(start: bytes, rest: bytes) -> None:
    found = picture_of(io.BytesIO(start + rest))
    assert found is None or (found.width > 0 and found.height > 0)


@given(data=st.sampled_from(list(MADE.values())), cut=st.integers(0, 400))
def test_a_picture_cut_anywhere_is_still_itself_or_none(data: tuple[bytes, Kind], cut: int) -> None:
    assert picture_of(io.BytesIO(data[0][:cut])) in (None, Picture(data[1], 128, 96))
