"""Open zip files from untrusted sources safely.

What an archive declares is checked first and counted again while it is read: table of contents, sizes,
ratios, data that entries share. Links, devices, encrypted entries and unusual compression are never read.
Names are only labels: whoever unpacks chooses the file names.
"""

from __future__ import annotations

import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Self

from core.domain.errors import GodMinerError


class BadArchive(GodMinerError):
    """An archive that cannot be used, or that looks malicious. The text may be sent to others."""

    code = "bad_archive"


class BadEntry(BadArchive):
    """One file of an archive that cannot be read; the others may be fine."""

    code = "bad_archive_entry"


@dataclass(frozen=True)
class ArchiveLimits:
    """Far beyond what validators send (50 pictures of a megapixel), far below what hurts."""

    entries: int = 20_000
    #: Of the archive's table of contents, which Python reads as a whole.
    table_bytes: int = 8 * 1024**2
    file_bytes: int = 256 * 1024**2
    all_bytes: int = 8 * 1024**3
    #: Of files above one megabyte: pictures hardly shrink, zip bombs shrink a thousandfold.
    ratio: float = 200.0


ARCHIVE_LIMITS = ArchiveLimits()
_RATIO_FROM = 1024**2
_CHUNK = 256 * 1024
_END, _END64, _FIND64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
#: What Python raises for a damaged archive.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    UnicodeError,
)


class Archive:
    """An open zip. `BadArchive` for anything else, or a bomb; all that is read counts against the limits."""

    def __init__(self, path: Path, limits: ArchiveLimits = ARCHIVE_LIMITS) -> None:
        self._limits = limits
        self._bytes_left = limits.all_bytes
        try:
            with path.open("rb") as file:
                self._check_table(file)
            self._zip = zipfile.ZipFile(path)
        except (*_DAMAGE, ValueError) as error:
            raise BadArchive(f"not a zip, or not a complete one: {error}") from None
        try:
            self._check_entries()
        except BadArchive:
            self._zip.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    @property
    def entries(self) -> list[zipfile.ZipInfo]:
        """Files and directories in the order of the table of contents; a name may occur twice."""
        return self._zip.infolist()

    def read_chunks(self, entry: zipfile.ZipInfo) -> Iterator[bytes]:
        """Yield a file's bytes; its checksum is compared at the end. `BadEntry` when it is damaged."""
        seen = 0
        try:
            with self._zip.open(entry) as file:
                while data := file.read(_CHUNK):
                    seen += len(data)
                    self._bytes_left -= len(data)
                    if seen > self._limits.file_bytes or self._bytes_left < 0:
                        name = quoted_name(entry.filename)
                        raise BadArchive(f"{name} unpacks to too much: {self._limit_text()}")
                    self._check_ratio(entry, seen)
                    yield data
        except _DAMAGE as error:
            raise BadEntry(f"damaged: {str(error)[:100]}") from None

    def _check_table(self, file: IO[bytes]) -> None:
        count, size = _declared_table(file)
        if count > self._limits.entries or size > self._limits.table_bytes:
            most = f"{self._limits.entries:,} at most are unpacked"
            raise BadArchive(f"the zip says that it holds {count:,} files ({size:,} bytes of names), {most}")

    def _check_entries(self) -> None:
        """Check the declared sizes. Data that entries share is stored once and unpacked many times."""
        entries, limits = self.entries, self._limits
        total = sum(entry.file_size for entry in entries)
        if len(entries) > limits.entries:
            raise BadArchive(f"the zip holds more than {limits.entries:,} files")
        if total > limits.all_bytes or any(entry.file_size > limits.file_bytes for entry in entries):
            raise BadArchive(f"the zip unpacks to {total / 1e9:.1f} GB: {self._limit_text()}")
        for entry in entries:
            self._check_ratio(entry, entry.file_size)
        if any(entry.header_offset < 0 for entry in entries):
            raise BadArchive("not a zip, or not a complete one: files begin before its start")
        places = sorted((entry.header_offset, entry.compress_size) for entry in entries)
        if any(first + size > second for (first, size), (second, _) in pairwise(places)):
            raise BadArchive("files in the zip overlap: a zip bomb")

    def _check_ratio(self, entry: zipfile.ZipInfo, size: int) -> None:
        if size > _RATIO_FROM and size > self._limits.ratio * max(entry.compress_size, 1):
            raise BadArchive(
                f"{quoted_name(entry.filename)} unpacks to over {self._limits.ratio:g} times its size: "
                "a zip bomb"
            )

    def _limit_text(self) -> str:
        one, whole = self._limits.file_bytes / 1e6, self._limits.all_bytes / 1e9
        return f"at most {one:.0f} MB a file and {whole:.1f} GB in all are unpacked"


def unusable_reason(entry: zipfile.ZipInfo) -> str | None:
    """Why an entry must not be read, whatever it holds."""
    if entry.flag_bits & 0x1:
        return "encrypted"
    if stat.S_IFMT(entry.external_attr >> 16) not in (0, stat.S_IFREG):
        return "a link or a device"
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "compressed in an unusual way"
    return None


def quoted_name(name: str) -> str:
    return repr(name[-80:])


def _declared_table(file: IO[bytes]) -> tuple[int, int]:
    """The number of entries and the bytes of their table, as the end of the file declares them.

    The largest numbers in any record that a reader might use: versions of Python differ in where they look.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 65_557, 0))  # the end record, with the longest comment there can be
    tail = file.read()
    records: list[tuple[int, int]] = []
    for at in {tail.rfind(_END), len(tail) - 22}:
        if at >= 0 and tail.startswith(_END, at):
            records += _end_records(file, tail[max(at - 20, 0) : at + 22], size - len(tail) + at)
    if not records:
        raise zipfile.BadZipFile("its table of contents is missing, as after an interrupted download")
    return max(count for count, _ in records), max(table for _, table in records)


def _end_records(file: IO[bytes], end: bytes, at: int) -> Iterator[tuple[int, int]]:
    """Read what the end record at `at` declares, with the records of large archives that belong to it."""
    count, table = struct.unpack("<HI", end[-12:-6])
    if len(end) == 42 and end.startswith(_FIND64):
        (place,) = struct.unpack("<Q", end[8:16])
        for start in (place, at - 20 - 56):
            file.seek(min(max(start, 0), at))
            record = file.read(56)
            if len(record) == 56 and record.startswith(_END64):
                yield struct.unpack("<QQ", record[32:48])
                # All ones means: too large for this record, see the other.
                count, table = count if count != 0xFFFF else 0, table if table != 0xFFFFFFFF else 0
    yield count, table
