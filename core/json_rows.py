"""Rows out of a JSON file one at a time: two gigabytes of them never lie in memory at once.

Validators send one array of objects; objects one after the other (JSON Lines) are read as well. The standard
library's decoder does the reading, a row at a time out of a window that slides over the file: no slower than
`json.load`, in the memory of a window and a row. (ijson's C backend is twice as fast, but builds the path of
what it reads at every level: a megabyte of `[` takes all memory there is.)
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, BinaryIO

from core.errors import GodMinerError

#: Bytes read at once; a row that is longer makes the window grow.
WINDOW = 256 * 1024
#: A row beyond this is no training example; it would have to be in memory whole.
MAX_ROW = 32 * 1024 * 1024

_BLANK = re.compile(r"[ \t\r\n]*")
#: How near to the end of a window a mistake may only be one of missing text: `\\ud83d\\ude00`, `-Infinity`.
_EDGE = 16
_NAMES = {str: "a string", int: "a number", float: "a number", bool: "a boolean", list: "an array"}


class BadRows(GodMinerError):
    """A file that is no table of rows. The text says where and why, in words that may travel."""

    code = "bad_rows"


class Form(StrEnum):
    ARRAY = "array"
    LINES = "lines"


class JsonRows:
    """Iterate over it once. Rows that are no objects are counted and left out."""

    def __init__(self, file: BinaryIO, *, window: int = WINDOW, max_row: int = MAX_ROW) -> None:
        self.form: Form | None = None
        #: Rows read so far, those that are no objects, and what the first of these was.
        self.count = 0
        self.odd = 0
        self.first_odd = ""
        #: Objects that say a key twice: the last one counts, as everywhere in Python.
        self.doubled = 0
        #: Bytes read so far.
        self.bytes = 0
        self._file = file
        self._window = window
        self._max_row = max_row
        self._text = ""
        self._at = 0
        #: Characters that have left the window.
        self._gone = 0
        self._over = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decode = json.JSONDecoder(object_pairs_hook=self._object).raw_decode

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._grow()
        self._check_start()
        rows = self._array() if self.form is Form.ARRAY else self._lines()
        for row in rows:
            self.count += 1
            if isinstance(row, dict):
                yield row
                continue
            self.odd += 1
            self.first_odd = self.first_odd or f"row {self.count} is {_NAMES.get(type(row), 'null')}"

    def _check_start(self) -> None:
        if self._text.startswith("\ufeff"):
            self._at = 1
        first = self._peek()
        if first not in ("[", "{"):
            found = f"begins with {self._text[self._at : self._at + 20]!r}" if first else "is empty"
            raise BadRows(f"the file {found}; a JSON array of rows is needed: [{{…}}, {{…}}]")
        self.form = Form.ARRAY if first == "[" else Form.LINES

    def _array(self) -> Iterator[Any]:
        self._at += 1
        if self._peek() == "]":
            self._at += 1
        else:
            yield self._row()
            while (mark := self._peek()) == ",":
                self._at += 1
                yield self._row()
            if mark != "]":
                raise self._bad(
                    "the array is not closed" if not mark else f"',' or ']' is needed, not {mark!r}"
                )
            self._at += 1
        if rest := self._peek():
            raise self._bad(f"the array is over, but {rest!r} follows")

    def _lines(self) -> Iterator[Any]:
        while self._peek():
            yield self._row()

    def _row(self) -> Any:
        if not self._peek():
            raise self._bad("a row is needed")
        while True:
            try:
                value, self._at = self._decode(self._text, self._at)
                return value
            except json.JSONDecodeError as error:
                place = self._gone + error.pos
                if not (self._may_go_on(error) and self._grow()):
                    raise self._bad(error.msg, place) from None
            except RecursionError:
                raise self._bad("it is nested too deeply") from None
            except ValueError as error:  # a number of more digits than Python reads
                raise self._bad(str(error)[:80]) from None

    def _may_go_on(self, error: json.JSONDecodeError) -> bool:
        """Whether more text could mend it. A string that is not closed is told by where it begins."""
        return error.pos >= len(self._text) - _EDGE or error.msg.startswith("Unterminated string")

    def _peek(self) -> str:
        """The next character that is not blank; nothing at the end of the file."""
        while True:
            found = _BLANK.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._grow():
                return ""

    def _grow(self) -> bool:
        """Moves the window on, by as much as it holds: a long row must not be read over and over."""
        if self._over:
            return False
        rest = self._text[self._at :]
        if len(rest) > self._max_row:
            raise self._bad(f"it is longer than {self._max_row:,} characters")
        data = self._file.read(max(self._window, len(rest)))
        self.bytes += len(data)
        self._over = not data
        self._gone += self._at
        self._text, self._at = rest + self._utf8.decode(data, final=not data), 0
        return not self._over or len(self._text) > len(rest)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        self.doubled += len(made) != len(pairs)
        return made

    def _bad(self, why: str, place: int | None = None) -> BadRows:
        place = self._gone + self._at if place is None else place
        return BadRows(f"row {self.count + 1:,} can not be read, at character {place:,}: {why}")
