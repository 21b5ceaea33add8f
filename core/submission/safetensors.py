"""The header of a safetensors file, read as strictly as the library that will load it.

A file has eight bytes of length, a JSON object of tensors, then the bytes of all tensors without gaps. The
data is not read here.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, BinaryIO

from core.domain.errors import GodMinerError
from core.submission.faults import printable

#: The largest real headers (mixtures of experts with 50,000 tensors) are 6 MB; the library's limit is 100 MB.
MAX_HEADER = 25_000_000
#: More dimensions than this are nonsense, and take time to multiply.
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
    """A file that cannot be loaded: the text says what is wrong, the value, and what to do."""

    code = "bad_safetensors"


@dataclass(frozen=True, slots=True)
class StoredTensor:
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
class SafetensorsHeader:
    #: By name, in the order of the file.
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    #: Offset of the tensors' bytes.
    data_at: int
    size: int


def read_header(file: BinaryIO) -> SafetensorsHeader:
    """Read the header of an open file. `BadHeader` if it is invalid or does not match the file's size."""
    size = os.fstat(file.fileno()).st_size
    if size < 8:
        raise BadHeader(f"has {size} bytes: the file is empty or was cut off; save it again")
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= MAX_HEADER:
        raise BadHeader(f"says that its header has {length:,} bytes: this is not a safetensors file")
    if length > size - 8:
        raise BadHeader(f"has a header of {length:,} bytes in {size:,}: the file was cut off; save it again")
    return parse_header(file.read(length), size)


def parse_header(text: bytes, size: int) -> SafetensorsHeader:
    """Read a header's JSON, which follows the first eight bytes of a file of `size` bytes."""
    data_at = 8 + len(text)
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except BadHeader:
        raise
    except (ValueError, RecursionError) as error:
        reason = printable(str(error), 80)
        raise BadHeader(f"has a header that is not valid JSON ({reason}); save it again") from None
    if not isinstance(header, dict):
        raise BadHeader("has a header that is not a JSON object; save it again")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadHeader("has __metadata__ that does not map text to text; save it again")
    tensors = [_tensor(name, entry, data_at) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    _check_coverage(tensors, data_at, size)
    return SafetensorsHeader({tensor.name: tensor for tensor in tensors}, metadata, data_at, size)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise BadHeader("has a key twice in its header; save it again")
    return unique


def _tensor(name: str, entry: Any, data_at: int) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadHeader(f"describes {printable(name)!r} by other keys than dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise BadHeader(f"has {printable(name)!r} of type {printable(dtype)}, which nothing can load")
    if not _numbers(shape) or len(shape) > MAX_DIMENSIONS or not _numbers(offsets) or len(offsets) != 2:
        raise BadHeader(f"has {printable(name)!r} whose shape or offsets are not lists of integers")
    bits = BITS[dtype]
    for dimension in shape:
        bits *= dimension
        if bits >= 1 << 63:
            raise BadHeader(f"has {printable(name)!r} of shape {printable(shape)}, larger than any file")
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        stored = f"{offsets[1] - offsets[0]:,} bytes"
        raise BadHeader(
            f"has {printable(name)!r} of {dtype} {printable(shape)} in {stored}: these do not match"
        )
    return StoredTensor(name, dtype, tuple(shape), data_at + offsets[0], data_at + offsets[1])


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)


def _check_coverage(tensors: list[StoredTensor], data_at: int, size: int) -> None:
    """Every byte belongs to exactly one tensor, as the library requires."""
    at = data_at
    for tensor in tensors:
        if tensor.begin != at:
            raise BadHeader(f"has a gap or an overlap before {printable(tensor.name)!r}; save it again")
        at = tensor.end
    if at > size:
        raise BadHeader(f"has {size:,} bytes where {at:,} belong: the file was cut off; save it again")
    if at < size:
        raise BadHeader(f"has {size - at:,} bytes after its last tensor; save it again")
