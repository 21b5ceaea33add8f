"""Rows out of CSV."""

from __future__ import annotations

import contextlib
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.csv_rows import CsvRows
from core.json_rows import BadRows


def test_the_first_line_names_the_columns_and_cells_may_hold_lines() -> None:
    rows = CsvRows(io.BytesIO(b'\xef\xbb\xbfinstruct,output\r\n"a\nb",c\r\nd,e,too much\r\nf\r\n'))
    assert list(rows) == [
        {"instruct": "a\nb", "output": "c"},
        {"instruct": "d", "output": "e"},
        {"instruct": "f", "output": None},
    ]
    assert rows.count == 3


def test_a_cell_of_no_sensible_size_is_refused() -> None:
    with pytest.raises(BadRows, match="row 1 can not be read as CSV"):
        list(CsvRows(io.BytesIO(b'a\n"' + b"x" * (33 * 1024**2) + b'"')))


@given(st.binary(max_size=300))
def test_bytes_of_any_kind_are_rows_or_a_clear_no(data: bytes) -> None:
    with contextlib.suppress(BadRows):
        assert all(None not in row for row in CsvRows(io.BytesIO(data)))
