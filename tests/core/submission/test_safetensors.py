from __future__ import annotations

import contextlib
import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.submission import safetensors
from core.submission.safetensors import BadHeader, read_header
from tests.core.submission import folders
from tests.core.submission.folders import bf16


def read(tmp_path: Path, content: bytes) -> safetensors.SafetensorsHeader:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with path.open("rb") as file:
        return read_header(file)


def raw(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_a_good_file_is_read_with_places_in_the_file(tmp_path: Path) -> None:
    content = folders.safetensors(
        {"a": bf16(2, 3), "b": ("F32", [], b"\0" * 4), "c": ("I64", [0, 9], b"")}, {"format": "pt"}
    )
    header = read(tmp_path, content)
    assert {name: (t.dtype, t.shape, t.count) for name, t in header.tensors.items()} == {
        "a": ("BF16", (2, 3), 6),
        "b": ("F32", (), 1),
        "c": ("I64", (0, 9), 0),
    }
    assert header.metadata == {"format": "pt"}
    assert header.tensors["b"].end == header.size == len(content)
    assert not read(tmp_path, raw(b"{}      ")).tensors, "padding behind the header is fine"


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "has 0 bytes: the file is empty or was cut off"),
        (b"\x01\0\0", "has 3 bytes"),
        (struct.pack("<Q", 1 << 60), "not a safetensors file"),
        (struct.pack("<Q", 1000) + b"{}", "a header of 1,000 bytes in 10"),
        (b"PK\x03\x04" + b"\0" * 100, "67,324,752 bytes: this is not a safetensors file"),
        (raw(b"[1, 2, 3]"), "not a JSON object"),
        (raw(b"{nope}"), "not valid JSON"),
        (raw(b"\xff\xff\xff"), "not valid JSON"),
        (raw(b"[" * 100_000), "not valid JSON"),
        (raw(b'{"a": 1, "a": 2}'), "a key twice"),
        (raw({"__metadata__": {"a": 1}}), "__metadata__"),
        (raw({"a": []}), "describes 'a'"),
        (raw({"a": {**ONE, "more": 1}}, b"\0" * 8), "describes 'a'"),
        (raw({"a": {**ONE, "dtype": "PICKLE"}}, b"\0" * 8), "type PICKLE"),
        (raw({"a": {**ONE, "shape": [-2]}}, b"\0" * 8), "not lists of integers"),
        (raw({"a": {**ONE, "shape": [True]}}, b"\0" * 8), "not lists of integers"),
        (raw({"a": {**ONE, "shape": [1] * 20}}, b"\0" * 8), "not lists of integers"),
        (raw({"a": {**ONE, "shape": [1 << 40, 1 << 40]}}, b"\0" * 8), "larger than any file"),
        (raw({"a": {**ONE, "shape": [3]}}, b"\0" * 8), "do not match"),
        (raw({"a": {**ONE, "data_offsets": [8, 0]}}, b"\0" * 8), "do not match"),
        (raw({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, b"\0"), "do not match"),
        (raw({"a": {**ONE, "data_offsets": [4, 12]}}, b"\0" * 12), "a gap or an overlap before 'a'"),
        (raw({"a": ONE, "b": {**ONE, "data_offsets": [4, 12]}}, b"\0" * 12), "overlap before 'b'"),
        (raw({"a": ONE}, b"\0" * 7), "was cut off"),
        (raw({"a": ONE}, b"\0" * 9), "1 bytes after its last tensor"),
        (raw({"\x1b[31m" + "x" * 500: []}), "…"),
    ],
)
def test_an_invalid_file_is_refused_with_the_reason(tmp_path: Path, content: bytes, expected: str) -> None:
    with pytest.raises(BadHeader) as caught:
        read(tmp_path, content)
    assert expected in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("headers")


GOOD = folders.safetensors(
    {"a": bf16(4), "b": ("F16", [2, 2], b"\0" * 8), "c": ("I8", [3], b"abc")}, {"k": "v"}
)


@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=6), st.integers(0, 40)
)
def test_a_damaged_file_is_refused_or_read_consistently(
    shared: Path, changes: list[tuple[int, int]], cut: int
) -> None:
    content = bytearray(GOOD)
    for at, value in changes:
        content[at] = value
    try:
        header = read(shared, bytes(content[: len(content) - cut]))
    except BadHeader:
        return
    covered = sum(tensor.end - tensor.begin for tensor in header.tensors.values())
    assert header.data_at + covered == header.size == len(GOOD) - cut


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_ABOUT = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*safetensors.BITS, "X"]) | _JSON,
        "shape": st.lists(st.integers(-1, 2**63), max_size=5) | _JSON,
        "data_offsets": st.lists(st.integers(-1, 2**63), max_size=3) | _JSON,
    }
)


@given(st.dictionaries(st.text(max_size=6), _ABOUT | _JSON, max_size=3), st.binary(max_size=64))
def test_any_header_is_read_or_refused(shared: Path, header: dict[str, Any], data: bytes) -> None:
    with contextlib.suppress(BadHeader):
        read(shared, raw(header, data))


def test_a_header_longer_than_any_real_one_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", safetensors.MAX_HEADER + 1))
        file.truncate(8 + safetensors.MAX_HEADER + 1)
    with path.open("rb") as opened:
        counted = io.BufferedReader(opened.raw)
        with pytest.raises(BadHeader, match="25,000,001 bytes"):
            read_header(counted)
        assert opened.raw.tell() < 100_000
