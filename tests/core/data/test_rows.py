from __future__ import annotations

import contextlib
import io
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.data.rows import BadRows, CsvRows, JsonRows
from tests.doubles.each import each

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
ROWS = st.lists(st.dictionaries(st.text(), VALUES, max_size=4), max_size=8)


def read(data: bytes, window: int = 64, **more: int) -> list[dict[str, Any]]:
    return list(JsonRows(io.BytesIO(data), window=window, **more))


def problem(data: bytes, window: int = 64, **more: int) -> str:
    with pytest.raises(BadRows) as caught:
        read(data, window, **more)
    return str(caught.value)


@given(rows=ROWS, window=st.integers(1, 200), ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_whatever_json_writes_is_read_back_through_windows_of_any_size(
    rows: list[dict[str, Any]], window: int, ascii_only: bool, indent: int | None
) -> None:
    # Half a surrogate pair has no bytes in UTF-8, so such a file would be written with escapes.
    text = json.dumps(rows, ensure_ascii=ascii_only, indent=indent)
    data = text.encode("utf-8", errors="replace")
    assert read(data, window) == json.loads(data)


@given(rows=ROWS.filter(bool), window=st.integers(1, 200), blank=st.sampled_from(["\n", "", " \r\n\n"]))
def test_json_lines_are_rows_too(rows: list[dict[str, Any]], window: int, blank: str) -> None:
    assert read(blank.join(map(json.dumps, rows)).encode(), window) == rows


@given(data=st.binary(max_size=300), window=st.integers(1, 64))
def test_any_bytes_are_json_rows_or_bad_rows(data: bytes, window: int) -> None:
    with contextlib.suppress(BadRows):
        rows = read(data, window)
        text = data.decode("utf-8", errors="replace").removeprefix("\ufeff")
        if text.lstrip(" \t\r\n").startswith("["):
            assert [row for row in json.loads(text) if isinstance(row, dict)] == rows


@given(text=st.text(alphabet='[]{},:"\\ua1e-.0tfn \n', max_size=60), window=st.integers(1, 40))
def test_almost_json_is_accepted_exactly_where_json_loads_accepts_it(text: str, window: int) -> None:
    text = "[" + text
    try:
        whole = json.loads(text)
    except ValueError:
        assert problem(text.encode(), window)
    else:
        assert read(text.encode(), window) == [row for row in whole if isinstance(row, dict)]


@each(
    ("data", "why"),
    [
        (b"", "is empty"),
        (b" \n\t ", "is empty"),
        (b"\0\0\0\0", "begins with '\\x00"),
        (b"instruct,output\na,b", "begins with 'instruct,output"),
        (b'"text"', "a JSON array of rows is needed"),
        (b"[", "a row is needed"),
        (b'[{"a": 1}', "the array is not closed"),
        (b'[{"a": 1}, {"a"', "row 2 cannot be read, at character 15"),
        (b'[{"a": "unfini', "Unterminated string"),
        (b'[{"a": 1},]', "Expecting value"),
        (b'[{"a": 1} {"a": 2}]', "',' or ']' is needed, not '{'"),
        (b'[{"a": 1}]\0\0', "the array is over, but '\\x00' follows"),
        (b'[{"a": 1}][1]', "the array is over"),
        (b'[{"a": "\0"}]', "Invalid control character"),
        (b'[{"a": "\\x"}]', "Invalid \\escape"),
        (b"[{'a': 1}]", "property name"),
        (b'[{"a": ' + b"9" * 5000 + b"}]", "digits"),
        (b"[" * 200_000, "nested too deeply"),
        (b'[{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_anything_but_an_array_of_rows_is_rejected_with_the_position(data: bytes, why: str) -> None:
    assert why in problem(data)


def test_a_byte_order_mark_is_skipped_and_invalid_bytes_are_replaced() -> None:
    assert read(b'\xef\xbb\xbf[{"a": "\xff\xc3\xa9"}]') == [{"a": "\N{REPLACEMENT CHARACTER}é"}]


def test_rows_that_are_not_objects_and_duplicate_keys_are_counted() -> None:
    reader = JsonRows(io.BytesIO(b'[{"a": 1, "a": 2}, 3, null, {"b": {"c": 1, "c": 1}}]'))
    assert list(reader) == [{"a": 2}, {"b": {"c": 1}}]
    assert (reader.count, reader.non_objects, reader.duplicate_keys) == (4, 2, 2)
    assert reader.first_non_object == "row 2 is a number"


def test_a_huge_row_is_rejected_before_it_is_in_memory() -> None:
    long = b'[{"a": "' + b"x" * 5000
    assert "longer than 1,000 characters" in problem(long + b'"}]', window=256, max_row=1000)
    assert len(read(long + b'"}]', window=256, max_row=10_000)) == 1


def test_memory_stays_that_of_a_window_and_a_row() -> None:
    rows = b"[" + b",".join([b'{"text": "' + b"word " * 200 + b'"}'] * 20_000) + b"]"
    file = io.BytesIO(rows)
    tracemalloc.start()
    assert sum(1 for _ in JsonRows(file)) == 20_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * 1024**2 < len(rows)


def test_the_first_line_names_the_columns_and_cells_may_hold_lines() -> None:
    rows = CsvRows(io.BytesIO(b'\xef\xbb\xbfinstruct,output\r\n"a\nb",c\r\nd,e,too much\r\nf\r\n'))
    assert list(rows) == [
        {"instruct": "a\nb", "output": "c"},
        {"instruct": "d", "output": "e"},
        {"instruct": "f", "output": None},
    ]
    assert rows.count == 3


def test_a_huge_csv_cell_is_rejected() -> None:
    with pytest.raises(BadRows, match="row 1 cannot be read as CSV"):
        list(CsvRows(io.BytesIO(b'a\n"' + b"x" * (33 * 1024**2) + b'"')))


@given(st.binary(max_size=300))
def test_any_bytes_are_csv_rows_or_bad_rows(data: bytes) -> None:
    with contextlib.suppress(BadRows):
        assert all(None not in row for row in CsvRows(io.BytesIO(data)))
