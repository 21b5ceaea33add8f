"""Zips made to do harm, and zips that are merely broken."""

from __future__ import annotations

import contextlib
import stat
import struct
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.data.archives import Archive, ArchiveLimits, BadArchive, BadEntry, unusable_reason
from tests.core.data.picture_files import make_zip, zip_bytes

SMALL = ArchiveLimits(entries=20, table_bytes=4096, file_bytes=3_000_000, all_bytes=5_000_000, ratio=100)


def put(folder: Path, data: bytes) -> Path:
    path = folder / "a.zip"
    path.write_bytes(data)
    return path


def problem(path: Path) -> str:
    def read() -> None:
        with Archive(path, SMALL) as archive:
            for entry in archive.entries:
                list(archive.read_chunks(entry))

    with pytest.raises(BadArchive) as caught:
        read()
    return str(caught.value)


def test_a_valid_zip_yields_its_files_in_chunks(tmp_path: Path) -> None:
    files = {"a/b.txt": bytes(range(256)) * 3000, "c": b""}
    with Archive(make_zip(tmp_path / "a.zip", files)) as archive:
        assert {entry.filename: b"".join(archive.read_chunks(entry)) for entry in archive.entries} == files
        assert [unusable_reason(entry) for entry in archive.entries] == [None, None]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"a": b"\0" * 2_000_000}, "'a' unpacks to over 100 times its size: a zip bomb"),
        ({f"{n}": b"x" * 1_000_000 for n in range(6)}, "unpacks to 0.0 GB: at most 3 MB a file and 0.0 GB"),
        ({f"{n}": b"" for n in range(21)}, "21 files"),
        ({"n" * 5000: b""}, "bytes of names"),
    ],
    ids=["ratio", "size", "files", "names"],
)
def test_bombs_are_rejected_by_their_declared_sizes(
    tmp_path: Path, files: dict[str, bytes], why: str
) -> None:
    assert why in problem(make_zip(tmp_path / "a.zip", files))


def test_a_bomb_with_a_false_size_is_stopped_while_it_is_read(tmp_path: Path) -> None:
    """The table says 1000 bytes; Python reads no further than that, and finds the sum wrong."""
    data = bytearray(zip_bytes({"a": b"\0" * 2_900_000}))
    at = data.rfind(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", 1000)
    with Archive(put(tmp_path, data), SMALL) as archive, pytest.raises(BadEntry):
        assert sum(map(len, archive.read_chunks(archive.entries[0]))) <= 1000


def test_limits_count_what_is_really_read(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.zip", {"a": bytes(range(256)) * 8000}, zipfile.ZIP_STORED)
    with Archive(path, SMALL) as archive:
        for _ in range(2):
            assert sum(map(len, archive.read_chunks(archive.entries[0]))) == 2_048_000
        with pytest.raises(BadArchive, match="unpacks to too much"):
            list(archive.read_chunks(archive.entries[0]))


def test_entries_that_share_data_are_rejected(tmp_path: Path) -> None:
    data = bytearray(zip_bytes({"a": b"x" * 500, "b": b"y" * 500}))
    second = data.rfind(b"PK\x01\x02")
    data[second + 42 : second + 46] = struct.pack("<I", 0)  # where b's data begins: where a's does
    assert "overlap" in problem(put(tmp_path, data))


ONE_FILE = zip_bytes({"a": b"x"})
END = ONE_FILE.rfind(b"PK\x05\x06")
#: The end record that says: see the one for large archives.
SEE_THERE = ONE_FILE[END : END + 8] + b"\xff" * 12 + b"\0\0"


def large_record(count: int, size: int, begin: int = 0) -> bytes:
    return struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, begin)


def locator(at: int) -> bytes:
    return struct.pack("<4sIQI", b"PK\x06\x07", 0, at, 1)


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (ONE_FILE[: END + 10] + b"\xff\xff" + ONE_FILE[END + 12 :], "65,535"),
        (ONE_FILE[:END] + large_record(10**9, 46 * 10**9) + locator(END) + ONE_FILE[END:], "1,000,000,000"),
        # Readers differ in which of two records they go by.
        (
            large_record(1, 46) + ONE_FILE[:END] + large_record(10**9, 46 * 10**9) + locator(0) + SEE_THERE,
            "1,000,000,000",
        ),
        (
            ONE_FILE[:END]
            + struct.pack("<4s4sHHIIH", b"PK\x05\x06", b"PK\x05\x06", 60_000, 60_000, 0x10000, 1, 0),
            "60,000",
        ),
    ],
    ids=["in the end record", "in the large record", "in the farther record", "inside of the end record"],
)
def test_a_table_of_millions_of_entries_is_not_read_wherever_its_size_is(
    tmp_path: Path, data: bytes, count: str
) -> None:
    assert f"{count} files" in problem(put(tmp_path, data))


def test_a_zip_with_its_numbers_in_the_large_record_is_read(tmp_path: Path) -> None:
    numbers = struct.unpack("<HII", ONE_FILE[END + 10 : END + 20])
    data = ONE_FILE[:END] + large_record(*numbers) + locator(END) + SEE_THERE
    with Archive(put(tmp_path, data), SMALL) as archive:
        assert [entry.filename for entry in archive.entries] == ["a"]


def test_damage_affects_only_the_damaged_file(tmp_path: Path) -> None:
    data = bytearray(zip_bytes({"a": bytes(range(256)) * 100, "b": b"fine"}))
    data[60] ^= 0xFF
    with Archive(put(tmp_path, data)) as archive:
        first, second = archive.entries
        with pytest.raises(BadEntry, match="damaged"):
            list(archive.read_chunks(first))
        assert b"".join(archive.read_chunks(second)) == b"fine"


def test_links_devices_and_encrypted_entries_are_unusable() -> None:
    entry = zipfile.ZipInfo("a")
    for kind in (stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO):
        entry.external_attr = (kind | 0o644) << 16
        assert unusable_reason(entry) == "a link or a device"
    entry.external_attr = (stat.S_IFREG | 0o644) << 16
    entry.flag_bits = 1
    assert unusable_reason(entry) == "encrypted"
    entry.flag_bits, entry.compress_type = 0, zipfile.ZIP_LZMA
    assert unusable_reason(entry) == "compressed in an unusual way"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "interrupted download"),
        (b"text", "interrupted download"),
        (b"PK\x05\x06", "not a zip"),
        (b"PK\x05\x06" + b"\xff" * 18, "files"),
        (zip_bytes({"a": b"x" * 1000})[:-30], "interrupted download"),
    ],
    ids=["empty", "text", "an end record cut off", "an end record of nothing", "a zip cut off"],
)
def test_anything_but_a_complete_zip_is_rejected(tmp_path: Path, data: bytes, why: str) -> None:
    assert why in problem(put(tmp_path, data))


SOUND = zip_bytes({"a/1.txt": b"one", "a/2.txt": b"two" * 400, "b": bytes(range(256))})


@given(data=st.data())
def test_a_zip_changed_anywhere_is_read_or_rejected(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(SOUND)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, max(len(content) - 1, 0)))
        content[at : at + 1] = data.draw(st.binary(max_size=4))
    path = put(tmp_path_factory.getbasetemp(), content)
    with contextlib.suppress(BadArchive), Archive(path, SMALL) as archive:
        for entry in archive.entries:
            with contextlib.suppress(BadEntry):
                assert sum(map(len, archive.read_chunks(entry))) <= SMALL.file_bytes
