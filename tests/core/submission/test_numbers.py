from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.submission.numbers import finite_test
from tests.doubles.each import each

FORMATS = {"F16": "<e", "F32": "<f", "F64": "<d"}


def value_of(dtype: str, item: bytes) -> float:
    if dtype == "BF16":
        return float(struct.unpack("<f", b"\0\0" + item)[0])
    return float(struct.unpack(FORMATS[dtype], item)[0])


@pytest.mark.parametrize(("dtype", "width"), [("F16", 2), ("BF16", 2), ("F32", 4), ("F64", 8)])
@given(data=st.data())
def test_a_number_that_is_not_finite_is_found_wherever_it_is(
    dtype: str, width: int, data: st.DataObject
) -> None:
    test = finite_test(dtype)
    assert test is not None
    items = data.draw(st.lists(st.binary(min_size=width, max_size=width), max_size=20))
    expected = any(not math.isfinite(value_of(dtype, item)) for item in items)
    assert test(b"".join(items)) is expected


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_every_number_of_sixteen_bits_is_told_rightly(dtype: str) -> None:
    test = finite_test(dtype)
    assert test is not None
    for number in range(1 << 16):
        item = number.to_bytes(2, "little")
        assert test(item) is not math.isfinite(value_of(dtype, item))


def test_eight_bits_are_told_by_their_formats_own_rules() -> None:
    def bad(dtype: str) -> set[int]:
        test = finite_test(dtype)
        assert test is not None
        return {byte for byte in range(256) if test(bytes([byte]))}

    assert bad("F8_E4M3") == {0x7F, 0xFF}
    assert bad("F8_E5M2") == {0x7C, 0x7D, 0x7E, 0x7F, 0xFC, 0xFD, 0xFE, 0xFF}
    assert bad("F8_E8M0") == {0xFF}
    assert bad("F8_E4M3FNUZ") == bad("F8_E5M2FNUZ") == {0x80}


@each("dtype", ["I8", "U8", "I64", "BOOL", "F4"])
def test_whole_numbers_are_always_finite(dtype: str) -> None:
    assert finite_test(dtype) is None
