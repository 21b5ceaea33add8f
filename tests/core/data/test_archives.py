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


def problem(path: Path, limits: ArchiveLimits = SMALL) -> str:
    def read() -> None:
        with Archive(path, limits) as archive:
            for entry in archive.entries:
                list(archive.read_chunks(entry))

    with pytest.raises(BadArchive) as caught:
        read()
    return str(caught.value)


def test_a_valid_zip_yields_its_files_in_chunks(tmp_path: Path) -> None:
    content = bytes(range(256)) * 3000
    with Archive(make_zip(tmp_path / "a.zip", {"a/b.txt": content, "c": b""})) as archive:
        found = {entry.filename: b"".join(archive.read_chunks(entry)) for entry in archive.entries}
        assert [unusable_reason(entry) for entry in archive.entries] == [None, None]
    assert found == {"a/b.txt": content, "c": b""}


def test_bombs_are_rejected_by_their_declared_sizes(tmp_path: Path) -> None:
    zeros = make_zip(tmp_path / "zeros.zip", {"a": b"\0" * 2_000_000})
    assert "'a' unpacks to over 100 times its size: a zip bomb" in problem(zeros)
    much = make_zip(tmp_path / "much.zip", {f"{n}": b"x" * 1_000_000 for n in range(6)})
    assert "unpacks to 0.0 GB: at most 3 MB a file and 0.0 GB in all" in problem(much)
    many = make_zip(tmp_path / "many.zip", {f"{n}": b"" for n in range(21)})
    assert "21 files" in problem(many)
    names = make_zip(tmp_path / "names.zip", {"n" * 5000: b""})
    assert "bytes of names" in problem(names)


def test_a_bomb_with_a_false_size_is_stopped_while_it_is_read(tmp_path: Path) -> None:
    """The table says 1000 bytes; Python reads no further than that, and finds the sum wrong."""
    data = bytearray(zip_bytes({"a": b"\0" * 2_900_000}))
    at = data.rfind(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", 1000)
    (tmp_path / "a.zip").write_bytes(data)
    with Archive(tmp_path / "a.zip", SMALL) as archive, pytest.raises(BadEntry):
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
    (tmp_path / "a.zip").write_bytes(data)
    assert "overlap" in problem(tmp_path / "a.zip")


def test_a_table_of_millions_of_entries_is_not_read(tmp_path: Path) -> None:
    data = bytearray(zip_bytes({"a": b"x"}))
    end = data.rfind(b"PK\x05\x06")
    data[end + 10 : end + 12] = struct.pack("<H", 65535)
    (tmp_path / "a.zip").write_bytes(data)
    assert "65,535 files" in problem(tmp_path / "a.zip")
    record = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, 9, 10**9, 46 * 10**9, 0)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
    (tmp_path / "b.zip").write_bytes(bytes(data[:end]) + record + locator + bytes(data[end:]))
    assert "1,000,000,000 files" in problem(tmp_path / "b.zip")


def test_no_second_record_hides_a_large_table_from_the_limits(tmp_path: Path) -> None:
    """Readers differ in which of two records they go by."""
    data = zip_bytes({"a": b"x"})
    end = data.rfind(b"PK\x05\x06")

    def record(count: int) -> bytes:
        return struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, 46 * count, 0)

    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, 0, 1)
    see_there = data[end : end + 8] + b"\xff" * 12 + b"\0\0"
    path = tmp_path / "far.zip"
    path.write_bytes(record(1) + data[:end] + record(10**9) + locator + see_there)
    assert "1,000,000,000 files" in problem(path)
    # An end record inside of the end record.
    inside = struct.pack("<4s4sHHIIH", b"PK\x05\x06", b"PK\x05\x06", 60_000, 60_000, 0x10000, 1, 0)
    (tmp_path / "inside.zip").write_bytes(data[:end] + inside)
    assert "60,000 files" in problem(tmp_path / "inside.zip")


def test_a_zip_with_its_numbers_in_the_large_record_is_read(tmp_path: Path) -> None:
    data = zip_bytes({"a": b"x"})
    end = data.rfind(b"PK\x05\x06")
    count, size, begin = struct.unpack("<HII", data[end + 10 : end + 20])
    record = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, begin)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
    see_there = data[end : end + 8] + b"\xff" * 12 + b"\0\0"
    (tmp_path / "a.zip").write_bytes(data[:end] + record + locator + see_there)
    with Archive(tmp_path / "a.zip", SMALL) as archive:
        assert [entry.filename for entry in archive.entries] == ["a"]


def test_damage_affects_only_the_damaged_file(tmp_path: Path) -> None:
    data = bytearray(zip_bytes({"a": bytes(range(256)) * 100, "b": b"fine"}))
    data[60] ^= 0xFF
    (tmp_path / "a.zip").write_bytes(data)
    with Archive(tmp_path / "a.zip") as archive:
        first, second = archive.entries
        with pytest.raises(BadEntry, match="damaged"):
            list(archive.read_chunks(first))
        assert b"".join(archive.read_chunks(second)) == b"fine"


def test_links_devices_and_encrypted_entries_are_unusable() -> None:
    entry = zipfile.ZipInfo("a")
    assert unusable_reason(entry) is None
    for kind in (stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO):
        entry.external_attr = (kind | 0o644) << 16
        assert unusable_reason(entry) == "a link or a device"
    entry.external_attr = (stat.S_IFREG | 0o644) << 16
    entry.flag_bits = 1
    assert unusable_reason(entry) == "encrypted"
    entry.flag_bits, entry.compress_type = 0, zipfile.ZIP_LZMA
    assert unusable_reason(entry) == "compressed in an unusual way"


@pytest.mark.parametrize("data", [b"", b"PK\x05\x06", b"text", b"PK\x05\x06" + b"\xff" * 18])
def test_anything_but_a_zip_is_rejected(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.zip").write_bytes(data)
    assert problem(tmp_path / "a.zip")


def test_an_incomplete_zip_is_rejected(tmp_path: Path) -> None:
    whole = zip_bytes({"a": b"x" * 1000})
    (tmp_path / "a.zip").write_bytes(whole[:-30])
    assert "interrupted download" in problem(tmp_path / "a.zip")


SOUND = zip_bytes({"a/1.txt": b"one", "a/2.txt": b"two" * 400, "b": bytes(range(256))})


@given(data=st.data())
def test_a_zip_changed_anywhere_is_read_or_rejected(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = bytearray(SOUND)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(made) - 1))
        made[at : at + 1] = data.draw(st.binary(max_size=4))
        if not made:
            break
    path = tmp_path_factory.getbasetemp() / "fuzzed.zip"
    path.write_bytes(made)
    with contextlib.suppress(BadArchive), Archive(path, SMALL) as archive:
        for entry in archive.entries:
            with contextlib.suppress(BadEntry):
                assert sum(map(len, archive.read_chunks(entry))) <= SMALL.file_bytes


def test_reading_stops_at_the_total_of_all_files(tmp_path: Path) -> None:
    tight = ArchiveLimits(all_bytes=2000)
    with Archive(make_zip(tmp_path / "a.zip", {"a": b"x" * 900, "b": b"y" * 1000}), tight) as archive:
        for entry in archive.entries:
            list(archive.read_chunks(entry))
        with pytest.raises(BadArchive, match="unpacks to too much"):
            list(archive.read_chunks(archive.entries[0]))
