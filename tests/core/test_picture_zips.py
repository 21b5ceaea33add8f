"""Pictures and captions out of zips, however these are made."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.archives import BadArchive
from core.picture_zips import look_into, unpack
from tests.core.pictures import jpeg, make_zip, png, webp

PAIRS = {"0.png": png(), "0.txt": b"a cat", "1.jpg": jpeg(), "1.txt": b"a dog"}


@pytest.mark.parametrize("folder", ["", "train_data/", "a/b/c/", "with blank & ü/"])
def test_any_number_of_folders_around_the_pictures_is_fine(tmp_path: Path, folder: str) -> None:
    zipped = make_zip(tmp_path / "a.zip", {folder + name: data for name, data in PAIRS.items()})
    found = look_into(zipped)
    assert [(pair.image, pair.caption) for pair in found.pairs] == [
        (folder + "0.png", folder + "0.txt"),
        (folder + "1.jpg", folder + "1.txt"),
    ]
    assert (found.captioned, found.left_out, found.notes()) == (2, [], [])
    unpack(zipped, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "00001.png",
        "00001.txt",
        "00002.jpg",
        "00002.txt",
    ]
    assert (tmp_path / "out/00001.png").read_bytes() == PAIRS["0.png"]
    assert (tmp_path / "out/00002.txt").read_text() == "a dog\n"


def test_names_that_climb_out_hide_or_collide_end_up_as_numbers(tmp_path: Path) -> None:
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
    found = unpack(make_zip(tmp_path / "a.zip", files), tmp_path / "out")
    assert {path.parent for path in tmp_path.rglob("*.png")} == {tmp_path / "out"}
    assert [pair.image for pair in found.pairs] == [
        f"{n:05}.{kind}" for n, kind in enumerate(("png", "png", "png", "jpg", "webp", "png"), 1)
    ]
    assert (tmp_path / "out/00003.txt").read_text() == "capitals\n"
    assert {name for name, why in found.left_out if why == "another file has the same name"} == {
        "..\\..\\evil.png",
        "b/same.jpg",
    }


def test_what_is_no_pair_is_left_out_with_the_reason(tmp_path: Path) -> None:
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
    found = look_into(make_zip(tmp_path / "a.zip", files))
    assert [pair.image for pair in found.pairs] == ["0.png", "1.jpg", "bare.png", "blank.png"]
    assert found.captioned == 2
    assert dict(found.left_out) == {
        "notes.md": "neither a picture nor a caption",
        "fake.png": "its header is no picture's",
        "tiny.png": "40×400 is too small, 64 a side is the least",
        "huge.jpg": "60000×60000 is too large",
        "lonely.txt": "it belongs to no picture",
    }
    assert "2 of 4 pictures have no caption" in found.notes()


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "holds no pictures"),
        ({"a.txt": b"x"}, "'a.txt' is left out (it belongs to no picture)"),
        (
            {"a.png": b"x", "b.gif": b"GIF89a"},
            "'b.gif' is left out (neither a picture nor a caption), and 1 more",
        ),
    ],
)
def test_a_zip_without_a_picture_is_no_dataset(tmp_path: Path, files: dict[str, bytes], why: str) -> None:
    with pytest.raises(BadArchive) as caught:
        look_into(make_zip(tmp_path / "a.zip", files))
    assert why in str(caught.value)


def test_a_caption_becomes_one_line_of_utf8(tmp_path: Path) -> None:
    files = {"a.png": png(), "a.txt": b"\xef\xbb\xbf two\r\nlines \xff\0and more\n"}
    unpack(make_zip(tmp_path / "a.zip", files), tmp_path / "out")
    assert (tmp_path / "out/00001.txt").read_text() == "two lines \N{REPLACEMENT CHARACTER} and more\n"


def test_links_and_encrypted_files_are_left_out(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("link.png")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("0.png", png())
        archive.writestr(link, "/etc/passwd")
    assert look_into(tmp_path / "a.zip").left_out == [("link.png", "a link or a device")]
    unpack(tmp_path / "a.zip", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["00001.png"]


def test_the_first_of_two_entries_of_one_name_counts(tmp_path: Path) -> None:
    with warnings.catch_warnings(), zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        warnings.simplefilter("ignore", UserWarning)
        archive.writestr("0.png", png(100, 100))
        archive.writestr("0.png", png(200, 200))
    found = unpack(tmp_path / "a.zip", tmp_path / "out")
    assert (tmp_path / "out/00001.png").read_bytes() == png(100, 100)
    assert found.left_out == [("0.png", "another file has the same name")]


def test_a_damaged_picture_is_left_out_and_the_rest_is_used(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.zip", {"0.png": png(), "1.png": png(90, 90)}, zipfile.ZIP_STORED)
    data = bytearray(path.read_bytes())
    data[200] ^= 0xFF
    path.write_bytes(data)
    found = look_into(path)
    assert [pair.image for pair in found.pairs] == ["1.png"]
    assert found.left_out[0][0] == "0.png"


def test_pictures_are_unpacked_into_a_folder_of_their_own(tmp_path: Path) -> None:
    zipped = make_zip(tmp_path / "a.zip", PAIRS)
    with pytest.raises(BadArchive, match="is not empty"):
        unpack(zipped, tmp_path)


NAMES = st.text(alphabet="ab/.\\:~ \n\tü", min_size=1, max_size=12)
ENDINGS = st.sampled_from([".png", ".txt", ".PNG", ".jpg", "", "/", ".png/../x.png"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(st.builds(str.__add__, NAMES, ENDINGS), min_size=1, max_size=8))
def test_whatever_the_names_are_files_land_flat_in_the_folder(
    names: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.mktemp("zip")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        zipped = make_zip(
            home / "a.zip", {name: b"text" if name.lower().endswith("txt") else png() for name in names}
        )
    try:
        found = unpack(zipped, home / "deep/out")
    except BadArchive:
        return
    written = {path for path in home.rglob("*") if path.is_file()} - {zipped}
    assert {path.parent for path in written} == {home / "deep/out"}
    expected = {name for pair in found.pairs for name in (pair.image, pair.caption) if name}
    assert {path.name for path in written} == expected
