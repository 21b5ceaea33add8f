"""Whether weights hold a NaN or an infinity, found without a numerical library and nearly as fast.

A float is one of both exactly when all bits of its exponent are set, and most of the exponent lies in its
last byte. So one strided copy of those bytes and a search in it settle nearly every piece of healthy weights;
only where a byte looks suspicious (a bfloat16 or float32 beyond 2^127) are the ones before it looked at too.
"""

from __future__ import annotations

from collections.abc import Callable

Test = Callable[[bytes], bool]

#: Exponents of five bits, as in F16 and F8_E5M2, lie whole in the last byte.
_FIVE_BITS = [bytes([byte]) for byte in range(256) if byte & 0x7C == 0x7C]


def _table(mask: int) -> bytes:
    """1 for each byte that has all bits of `mask`, else 0."""
    return bytes(byte & mask == mask for byte in range(256))


def _wide(width: int, mask: int) -> Test:
    """Exponents of seven bits in the last byte and those of `mask` in the one before."""
    last, before = _table(0x7F), _table(mask)

    def test(data: bytes) -> bool:
        high = data[width - 1 :: width]
        if b"\x7f" not in high and b"\xff" not in high:
            return False
        low = data[width - 2 :: width]
        marks = int.from_bytes(high.translate(last), "little")
        return marks & int.from_bytes(low.translate(before), "little") != 0

    return test


def _five_bits(data: bytes) -> bool:
    return any(byte in data for byte in _FIVE_BITS)


_TESTS: dict[str, Test] = {
    "BF16": _wide(2, 0x80),
    "F32": _wide(4, 0x80),
    "C64": _wide(4, 0x80),
    "F64": _wide(8, 0xF0),
    "F16": lambda data: _five_bits(data[1::2]),
    "F8_E5M2": _five_bits,
    "F8_E4M3": lambda data: b"\x7f" in data or b"\xff" in data,
    "F8_E8M0": lambda data: b"\xff" in data,
    "F8_E4M3FNUZ": lambda data: b"\x80" in data,
    "F8_E5M2FNUZ": lambda data: b"\x80" in data,
}


def finite_test(dtype: str) -> Test | None:
    """What finds a NaN or an infinity in little-endian bytes of this type, of a whole number of items; None
    for types that have none."""
    return _TESTS.get(dtype)
