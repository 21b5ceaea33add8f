"""Read rows from a JSON or CSV file one at a time, so that two gigabytes of them are never in memory.

Validators send one array of objects; JSON Lines are read as well. The standard library's decoder reads
one row at a time from a window that slides over the file: as fast as `json.load`, in the memory of a
window and a row. (ijson's C backend is twice as fast, but builds the path of what it reads at every
level: a megabyte of `[` takes all the memory there is.)
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from core.domain.errors import ConfigError, GodMinerError, Problem

#: Bytes read at once; a row that is longer makes the window grow.
WINDOW = 256 * 1024
#: A longer row is not a training example; it would have to be in memory as a whole.
MAX_ROW = 32 * 1024 * 1024

_WHITESPACE = re.compile(r"[ \t\r\n]*")
#: An error so near to the end of the window may only be missing text: `\\ud83d\\ude00`, `-Infinity`.
_EDGE = 16
_JSON_TYPE_NAMES = {str: "a string", int: "a number", float: "a number", bool: "a boolean", list: "an array"}


class BadRows(GodMinerError):
    """A file that is not a table of rows. The text says where and why, and may be sent to others."""

    code = "bad_rows"


class JsonRows:
    """Iterate over it once. Rows that are not objects are counted and skipped."""

    def __init__(self, file: BinaryIO, *, window: int = WINDOW, max_row: int = MAX_ROW) -> None:
        #: Rows read so far, those that are not objects, and what the first of these is.
        self.count = 0
        self.non_objects = 0
        self.first_non_object = ""
        #: Objects with a key twice: the last one counts, as everywhere in Python.
        self.duplicate_keys = 0
        #: Bytes read so far.
        self.bytes = 0
        self._file = file
        self._window = window
        self._max_row = max_row
        self._text = ""
        self._position = 0
        #: Characters that have left the window.
        self._characters_passed = 0
        self._at_end = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decode = json.JSONDecoder(object_pairs_hook=self._object).raw_decode

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._read_more()
        rows = self._array() if self._begins_with_array() else self._lines()
        for row in rows:
            self.count += 1
            if isinstance(row, dict):
                yield row
                continue
            self.non_objects += 1
            self.first_non_object = (
                self.first_non_object or f"row {self.count} is {_JSON_TYPE_NAMES.get(type(row), 'null')}"
            )

    def _begins_with_array(self) -> bool:
        if self._text.startswith("\ufeff"):
            self._position = 1
        first = self._peek()
        if first not in ("[", "{"):
            start = self._text[self._position : self._position + 20]
            problem = f"begins with {start!r}" if first else "is empty"
            raise BadRows(f"the file {problem}; a JSON array of rows is needed: [{{…}}, {{…}}]")
        return first == "["

    def _array(self) -> Iterator[Any]:
        self._position += 1
        if self._peek() == "]":
            self._position += 1
        else:
            yield self._row()
            while (mark := self._peek()) == ",":
                self._position += 1
                yield self._row()
            if mark != "]":
                raise self._error_at(
                    "the array is not closed" if not mark else f"',' or ']' is needed, not {mark!r}"
                )
            self._position += 1
        if rest := self._peek():
            raise self._error_at(f"the array is over, but {rest!r} follows")

    def _lines(self) -> Iterator[Any]:
        while self._peek():
            yield self._row()

    def _row(self) -> Any:
        if not self._peek():
            raise self._error_at("a row is needed")
        while True:
            try:
                value, self._position = self._decode(self._text, self._position)
                return value
            except json.JSONDecodeError as error:
                place = self._characters_passed + error.pos
                if not (self._may_be_incomplete(error) and self._read_more()):
                    raise self._error_at(error.msg, place) from None
            except RecursionError:
                raise self._error_at("it is nested too deeply") from None
            except ValueError as error:  # a number of more digits than Python reads
                raise self._error_at(str(error)[:80]) from None

    def _may_be_incomplete(self, error: json.JSONDecodeError) -> bool:
        """Return whether more text could fix it. An unclosed string is reported by its beginning."""
        return error.pos >= len(self._text) - _EDGE or error.msg.startswith("Unterminated string")

    def _peek(self) -> str:
        """Return the next non-blank character, or "" at the end of the file."""
        while True:
            blank = _WHITESPACE.match(self._text, self._position)
            self._position = blank.end() if blank else self._position
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._read_more():
                return ""

    def _read_more(self) -> bool:
        """Move the window on by as much as it holds: a long row must not be read over and over."""
        if self._at_end:
            return False
        rest = self._text[self._position :]
        if len(rest) > self._max_row:
            raise self._error_at(f"it is longer than {self._max_row:,} characters")
        data = self._file.read(max(self._window, len(rest)))
        self.bytes += len(data)
        self._at_end = not data
        self._characters_passed += self._position
        self._text, self._position = rest + self._utf8.decode(data, final=not data), 0
        return not self._at_end or len(self._text) > len(rest)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        row = dict(pairs)
        self.duplicate_keys += len(row) != len(pairs)
        return row

    def _error_at(self, why: str, place: int | None = None) -> BadRows:
        place = self._characters_passed + self._position if place is None else place
        return BadRows(f"row {self.count + 1:,} cannot be read, at character {place:,}: {why}")


class CsvRows:
    """Iterate over it once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.count = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        csv.field_size_limit(MAX_ROW)
        text = io.TextIOWrapper(self._file, encoding="utf-8-sig", errors="replace", newline="")
        try:
            for row in csv.DictReader(text):
                self.count += 1
                row.pop(None, None)  # cells beyond the named columns
                yield row
        except csv.Error as error:
            raise BadRows(f"row {self.count + 1:,} cannot be read as CSV: {error}") from None
        finally:
            text.detach()


#: Rows measured for lengths, evenly spread over the file.
SAMPLED_ROWS = 2000


def sample_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return a sample of the rows and their number. Raise `ConfigError` if the file is not a dataset."""
    sample: list[dict[str, Any]] = []
    picker, count = random.Random(0), 0  # noqa: S311 - a sample, not a secret
    try:
        with path.open("rb") as file:
            rows = JsonRows(file)
            for count, row in enumerate(rows, 1):
                if len(sample) < SAMPLED_ROWS:
                    sample.append(row)
                elif (place := int(picker.random() * count)) < SAMPLED_ROWS:
                    sample[place] = row
    except BadRows as error:
        raise _not_a_dataset(path, "", f"is not a dataset: {error}") from None
    if rows.non_objects:
        rule = f"every row is a JSON object, {rows.first_non_object}"
        raise _not_a_dataset(path, f"{rows.non_objects} rows", rule)
    return sample, count


def _not_a_dataset(path: Path, value: str, rule: str) -> ConfigError:
    return ConfigError(str(path), [Problem(path.name, value, rule)])
