from __future__ import annotations

import io
import re
import warnings
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.data.archives import BadArchive
from core.data.pictures import (
    PictureFormat,
    PictureInfo,
    inspect_picture_zip,
    read_picture_info,
    unpack_pictures,
)
from tests.core.data.picture_files import bmp, jpeg, make_zip, png, webp
from tests.doubles.each import each

PAIRS = {"0.png": png(), "0.txt": b"a cat", "1.jpg": jpeg(), "1.txt": b"a dog"}


@pytest.mark.parametrize("folder", ["", "train_data/", "a/b/c/", "with blank & ü/"])
def test_pictures_may_be_in_any_directory_of_the_zip(tmp_path: Path, folder: str) -> None:
    zipped = make_zip(tmp_path / "a.zip", {folder + name: data for name, data in PAIRS.items()})
    pairs = inspect_picture_zip(zipped)
    assert [(pair.image, pair.caption) for pair in pairs.pairs] == [
        (folder + "0.png", folder + "0.txt"),
        (folder + "1.jpg", folder + "1.txt"),
    ]
    assert (pairs.captioned, pairs.skipped, pairs.notes()) == (2, [], [])
    unpack_pictures(zipped, tmp_path / "out")
    unpacked = {path.name for path in (tmp_path / "out").iterdir()}
    assert unpacked == {"00001.png", "00001.txt", "00002.jpg", "00002.txt"}
    assert (tmp_path / "out/00001.png").read_bytes() == PAIRS["0.png"]
    assert (tmp_path / "out/00002.txt").read_text() == "a dog\n"


def test_captions_stay_as_they_are_where_they_are_scored(tmp_path: Path) -> None:
    said = b"two  lines\r\n of a caption \n"
    zipped = make_zip(
        tmp_path / "a.zip", {"0.png": png(), "0.txt": said, "1.png": png(1, 1), "1.txt": b" \n"}
    )
    unpack_pictures(zipped, tmp_path / "out", verbatim=True)
    assert (tmp_path / "out/00001.txt").read_bytes() == said
    assert (tmp_path / "out/00002.png").exists()  # the evaluation enlarges any picture
    assert not (tmp_path / "out/00002.txt").exists()


def test_hostile_and_colliding_names_become_numbers(tmp_path: Path) -> None:
    files = {
        "../../evil.png": png(),
        "/abs/evil.png": png(),
        "..\\..\\evil.png": png(),
        "a.PNG": png(),
        "A.TXT": b"capitals",
        "C:\\x.jpeg": jpeg(),
        "n\nl/ü.webp": webp(),
        "b/same.png": png(64, 64),
        "b/same.jpg": jpeg(),
        "b/same.txt": b"one of two",
    }
    pairs = unpack_pictures(make_zip(tmp_path / "a.zip", files), tmp_path / "out")
    assert {path.parent for path in tmp_path.rglob("*.png")} == {tmp_path / "out"}
    assert [pair.image for pair in pairs.pairs] == [
        f"{n:05}.{kind}" for n, kind in enumerate(("png", "png", "png", "jpg", "webp", "png"), 1)
    ]
    assert (tmp_path / "out/00003.txt").read_text() == "capitals\n"
    assert {name for name, why in pairs.skipped if why == "another file has the same name"} == {
        "..\\..\\evil.png",
        "b/same.jpg",
    }


def test_files_of_no_pair_are_skipped_with_the_reason(tmp_path: Path) -> None:
    files = {
        **PAIRS,
        "__MACOSX/._0.png": b"litter",
        ".DS_Store": b"litter",
        "notes.md": b"x",
        "fake.png": b"no picture",
        "tiny.png": png(40, 400),
        "huge.jpg": jpeg(60_000, 60_000),
        "lonely.txt": b"x",
        "bare.png": png(),
        "blank.png": png(),
        "blank.txt": b" \n",
    }
    pairs = inspect_picture_zip(make_zip(tmp_path / "a.zip", files))
    assert [pair.image for pair in pairs.pairs] == ["0.png", "1.jpg", "bare.png", "blank.png"]
    assert pairs.captioned == 2
    assert dict(pairs.skipped) == {
        "notes.md": "neither a picture nor a caption",
        "fake.png": "its header is not a picture's",
        "tiny.png": "40×400 is too small, 64 a side is the least",
        "huge.jpg": "60000×60000 is too large",
        "lonely.txt": "it belongs to no picture",
    }
    assert "2 of 4 pictures have no caption" in pairs.notes()


@each(
    ("files", "why"),
    [
        ({}, "holds no pictures"),
        ({"a.txt": b"x"}, "'a.txt' is left out (it belongs to no picture)"),
        ({"a.png": b"x", "b.gif": b"GIF89a"}, "'b.gif' is left out (neither a picture nor a"),
    ],
)
def test_a_zip_without_a_usable_picture_is_rejected(
    tmp_path: Path, files: dict[str, bytes], why: str
) -> None:
    with pytest.raises(BadArchive, match=re.escape(why)):
        inspect_picture_zip(make_zip(tmp_path / "a.zip", files))


def test_a_caption_becomes_one_line_of_utf8(tmp_path: Path) -> None:
    files = {"a.png": png(), "a.txt": b"\xef\xbb\xbf two\r\nlines \xff\0and more\n"}
    unpack_pictures(make_zip(tmp_path / "a.zip", files), tmp_path / "out")
    assert (tmp_path / "out/00001.txt").read_text() == "two lines \N{REPLACEMENT CHARACTER} and more\n"


def test_links_are_skipped(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("link.png")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("0.png", png())
        archive.writestr(link, "/etc/passwd")
    contents = unpack_pictures(tmp_path / "a.zip", tmp_path / "out")
    assert contents.skipped == [("link.png", "a link or a device")]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["00001.png"]


def test_the_first_of_two_entries_of_one_name_counts(tmp_path: Path) -> None:
    with warnings.catch_warnings(), zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        warnings.simplefilter("ignore", UserWarning)
        archive.writestr("0.png", png(100, 100))
        archive.writestr("0.png", png(200, 200))
    pairs = unpack_pictures(tmp_path / "a.zip", tmp_path / "out")
    assert (tmp_path / "out/00001.png").read_bytes() == png(100, 100)
    assert pairs.skipped == [("0.png", "another file has the same name")]


def test_a_damaged_picture_is_skipped_and_the_rest_is_used(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.zip", {"0.png": png(), "1.png": png(90, 90)}, zipfile.ZIP_STORED)
    data = bytearray(path.read_bytes())
    data[200] ^= 0xFF
    path.write_bytes(data)
    pairs = inspect_picture_zip(path)
    assert [pair.image for pair in pairs.pairs] == ["1.png"]
    assert pairs.skipped[0][0] == "0.png"


def test_pictures_are_unpacked_only_into_an_empty_directory(tmp_path: Path) -> None:
    zipped = make_zip(tmp_path / "a.zip", PAIRS)
    with pytest.raises(BadArchive, match="is not empty"):
        unpack_pictures(zipped, tmp_path)


NAMES = st.text(alphabet="ab/.\\:~ \n\tü", min_size=1, max_size=12)
ENDINGS = st.sampled_from([".png", ".txt", ".PNG", ".jpg", "", "/", ".png/../x.png"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(st.builds(str.__add__, NAMES, ENDINGS), min_size=1, max_size=8))
def test_any_names_become_flat_files_in_the_directory(
    names: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.mktemp("zip")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        zipped = make_zip(
            home / "a.zip", {name: b"text" if name.lower().endswith("txt") else png() for name in names}
        )
    try:
        pairs = unpack_pictures(zipped, home / "deep/out")
    except BadArchive:
        return
    written = {path for path in home.rglob("*") if path.is_file()} - {zipped}
    assert {path.parent for path in written} == {home / "deep/out"}
    expected = {name for pair in pairs.pairs for name in (pair.image, pair.caption) if name}
    assert {path.name for path in written} == expected


PICTURES: dict[bytes, PictureFormat] = {
    png(): PictureFormat.PNG,
    jpeg(): PictureFormat.JPEG,
    jpeg(before=300_000): PictureFormat.JPEG,
    **{webp(kind=kind): PictureFormat.WEBP for kind in (b"VP8 ", b"VP8L", b"VP8X")},
    bmp(): PictureFormat.BMP,
}


@each(("data", "kind"), PICTURES.items())
def test_format_and_size_come_from_the_header(data: bytes, kind: PictureFormat) -> None:
    assert read_picture_info(io.BytesIO(data)) == PictureInfo(kind, 128, 96)


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
def test_anything_but_a_complete_picture_header_yields_none(data: bytes) -> None:
    assert read_picture_info(io.BytesIO(data)) is None


@given(
    start=st.sampled_from([b"", b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"RIFF1234WEBP", b"BM"]),
    rest=st.binary(max_size=200),
)
def test_any_bytes_are_a_picture_with_a_size_or_none(start: bytes, rest: bytes) -> None:
    picture = read_picture_info(io.BytesIO(start + rest))
    assert picture is None or (picture.width > 0 and picture.height > 0)


@given(data=st.sampled_from(list(PICTURES)), cut=st.integers(0, 400))
def test_a_picture_cut_anywhere_is_still_itself_or_none(data: bytes, cut: int) -> None:
    assert read_picture_info(io.BytesIO(data[:cut])) in (None, PictureInfo(PICTURES[data], 128, 96))
