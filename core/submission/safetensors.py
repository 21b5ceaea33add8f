"""The header of a safetensors file, read as strictly as the library that will load it.

Eight bytes of length, a JSON object of tensors, then the bytes of all tensors without a gap. Nothing of the
data is read here.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

from core.errors import GodMinerError
from core.submission.faults import shown

#: The largest real ones (mixtures of experts with 50,000 tensors) have 6 MB; the library's own limit is 100.
MAX_HEADER = 25_000_000
#: A product of more dimensions than this is nonsense, and costs time.
MAX_DIMENSIONS = 16

BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
}


class BadHeader(GodMinerError):
    """Not a file that can be loaded: the text says what, the value and the way out."""

    code: ClassVar[str] = "bad_safetensors"


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    #: Offsets in the file.
    begin: int
    end: int

    @property
    def count(self) -> int:
        return (self.end - self.begin) * 8 // BITS[self.dtype]


@dataclass(frozen=True, slots=True)
class Header:
    #: By name, in the order of the file.
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    #: Where the tensors' bytes begin.
    data_at: int
    size: int


def read_header(file: BinaryIO) -> Header:
    """The header of an open file, which is left behind its end. `BadHeader` when it is none or does not fit
    the file's length."""
    size = os.fstat(file.fileno()).st_size
    if size < 8:
        raise BadHeader(f"has {size} bytes: the file is empty or was cut off; save it again")
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= MAX_HEADER:
        raise BadHeader(f"says that its header has {length:,} bytes: this is no safetensors file")
    if length > size - 8:
        raise BadHeader(f"has a header of {length:,} bytes in {size:,}: the file was cut off; save it again")
    return _parsed(file.read(length), 8 + length, size)


def _parsed(text: bytes, data_at: int, size: int) -> Header:
    try:
        found = json.loads(text, object_pairs_hook=_unique)
    except BadHeader:
        raise
    except (ValueError, RecursionError) as error:
        raise BadHeader(f"has a header that is no JSON ({shown(str(error), 80)}); save it again") from None
    if not isinstance(found, dict):
        raise BadHeader("has a header that is no JSON object; save it again")
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadHeader("has __metadata__ that is not text by text; save it again")
    tensors = sorted(
        (_tensor(name, about, data_at) for name, about in found.items()), key=lambda tensor: tensor.begin
    )
    _fits(tensors, data_at, size)
    return Header({tensor.name: tensor for tensor in tensors}, metadata, data_at, size)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise BadHeader("names something twice in its header; save it again")
    return found


def _tensor(name: str, about: Any, data_at: int) -> Tensor:
    if not isinstance(about, dict) or about.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadHeader(f"describes {shown(name)!r} by something else than dtype, shape and data_offsets")
    dtype, shape, offsets = about["dtype"], about["shape"], about["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise BadHeader(f"has {shown(name)!r} of type {shown(dtype)}, which nothing can load")
    if not _numbers(shape) or len(shape) > MAX_DIMENSIONS or not _numbers(offsets) or len(offsets) != 2:
        raise BadHeader(f"has {shown(name)!r} with a shape or place that is no list of whole numbers")
    bits = BITS[dtype]
    for dimension in shape:
        bits *= dimension
        if bits >= 1 << 63:
            raise BadHeader(f"has {shown(name)!r} of shape {shown(shape)}, larger than any file")
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        given = f"{offsets[1] - offsets[0]:,} bytes"
        raise BadHeader(f"has {shown(name)!r} of {dtype} {shown(shape)} in {given}: these do not fit")
    return Tensor(name, dtype, tuple(shape), data_at + offsets[0], data_at + offsets[1])


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 1 << 62 for one in value)


def _fits(tensors: list[Tensor], data_at: int, size: int) -> None:
    """All bytes belong to exactly one tensor, as the library wants it."""
    at = data_at
    for tensor in sorted(tensors, key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != at:
            raise BadHeader(f"has a gap or an overlap before {shown(tensor.name)!r}; save it again")
        at = tensor.end
    if at > size:
        raise BadHeader(f"has {size:,} bytes where {at:,} belong: the file was cut off; save it again")
    if at < size:
        raise BadHeader(f"has {size - at:,} bytes behind its last tensor; save it again")
