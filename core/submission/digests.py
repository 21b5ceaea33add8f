"""Digest a file in one pass: its SHA-256, and for weights whether every number is finite.

A float is NaN or infinite exactly when all bits of its exponent are set, and most of the exponent is in its
last byte. So one strided copy of those bytes and a search in it clear nearly every block of healthy weights;
only if such a byte is found (a bfloat16 or float32 beyond 2^127) are the bytes before it checked too.

Also the hash that validators take of a repository (docs/protocol.md, "model_hash").
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path
from typing import BinaryIO

from core.submission.folder import file_identity, open_plain
from core.submission.safetensors import SafetensorsHeader, StoredTensor, read_header

NotFiniteTest = Callable[[bytes], bool]

#: The last byte contains all of a five-bit exponent, as in F16 and F8_E5M2.
_FIVE_BITS = [bytes([byte]) for byte in range(256) if byte & 0x7C == 0x7C]


def _table(mask: int) -> bytes:
    """1 for each byte that has all bits of `mask`, else 0."""
    return bytes(byte & mask == mask for byte in range(256))


def _wide(width: int, mask: int) -> NotFiniteTest:
    """Test exponents with seven bits in the last byte and those of `mask` in the one before."""
    last, before = _table(0x7F), _table(mask)

    def test(data: bytes) -> bool:
        high = data[width - 1 :: width]
        if b"\x7f" not in high and b"\xff" not in high:
            return False
        low = data[width - 2 :: width]
        marks = int.from_bytes(high.translate(last), "little")
        return marks & int.from_bytes(low.translate(before), "little") != 0

    return test


def _any_of(*values: bytes) -> NotFiniteTest:
    """Test exponents that are whole bytes with one of these values."""

    def test(data: bytes) -> bool:
        return any(value in data for value in values)

    return test


_f8_e5m2 = _any_of(*_FIVE_BITS)


def _f16(data: bytes) -> bool:
    return _f8_e5m2(data[1::2])


#: By type, a test for NaN or infinity in little-endian bytes of complete items. Other types have neither.
NOT_FINITE_TESTS: dict[str, NotFiniteTest] = {
    "BF16": _wide(2, 0x80),
    "F32": _wide(4, 0x80),
    "C64": _wide(4, 0x80),
    "F64": _wide(8, 0xF0),
    "F16": _f16,
    "F8_E5M2": _f8_e5m2,
    "F8_E4M3": _any_of(b"\x7f", b"\xff"),
    "F8_E8M0": _any_of(b"\xff"),
    "F8_E4M3FNUZ": _any_of(b"\x80"),
    "F8_E5M2FNUZ": _any_of(b"\x80"),
}


#: A multiple of every item's size; larger blocks do not fit the processor's cache.
BLOCK = 2 << 20
#: Enough names to show what is wrong.
MAX_NAMED = 3

#: Called with the number of bytes read since the last call.
OnBytesRead = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class FileDigest:
    sha256: str
    size: int
    #: Tensors with a NaN or an infinity: the first few, and how many in all.
    not_finite: tuple[str, ...] = ()
    not_finite_count: int = 0
    header: SafetensorsHeader | None = None


def digest_file(path: Path, on_read: OnBytesRead | None = None, *, plain: bool = False) -> FileDigest:
    """Read a file of any size once, in constant memory. `BadHeader` for invalid weights, `OSError` if the
    file cannot be read or changes meanwhile. `plain` treats weights like any other file."""
    with open(open_plain(path), "rb", buffering=0) as file, _ThreadedHash() as digest:
        before = file_identity(os.fstat(file.fileno()))
        if path.name.endswith(".safetensors") and not plain:
            result = _digest_weights(file, digest, on_read)
        else:
            for block in _blocks(file, before[2], on_read):
                digest.update(block)
            result = FileDigest(digest.hex(), before[2])
        if file_identity(os.fstat(file.fileno())) != before:
            raise OSError(f"{path.name} was written to while it was read")
        return result


def check_weights(path: Path) -> FileDigest:
    """Check that every number of a weight file is finite, without its hash: a third of the time."""
    with open(open_plain(path), "rb", buffering=0) as file:
        return _digest_weights(file, _NoHash(), None)


def _digest_weights(
    file: BinaryIO, digest: _NoHash | _ThreadedHash, on_read: OnBytesRead | None
) -> FileDigest:
    header = read_header(file)
    file.seek(0)
    for block in _blocks(file, header.data_at, on_read):
        digest.update(block)
    bad: list[str] = []
    for tensor in sorted(header.tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        if not _is_finite(tensor, file, digest, on_read):
            bad.append(tensor.name)
    return FileDigest(digest.hex(), header.size, tuple(bad[:MAX_NAMED]), len(bad), header)


def _is_finite(
    tensor: StoredTensor, file: BinaryIO, digest: _NoHash | _ThreadedHash, on_read: OnBytesRead | None
) -> bool:
    test, finite = NOT_FINITE_TESTS.get(tensor.dtype), True
    for block in _blocks(file, tensor.end - tensor.begin, on_read):
        digest.update(block)
        if test is not None and finite and test(block):
            finite = False
    return finite


def _blocks(file: BinaryIO, count: int, on_read: OnBytesRead | None) -> Iterator[bytes]:
    while count > 0:
        block = _read(file, min(BLOCK, count))
        count -= len(block)
        if on_read is not None:
            on_read(len(block))
        yield block


def _read(file: BinaryIO, count: int) -> bytes:
    block = file.read(count)
    while len(block) < count:
        more = file.read(count - len(block))
        if not more:
            raise OSError("the file was cut while it was read")
        block += more
    return block


class _NoHash:
    def update(self, block: bytes) -> None:
        """The bytes are not hashed."""

    def hex(self) -> str:
        return ""


class _ThreadedHash:
    """SHA-256 in its own thread: it releases the GIL, so search and hash run on two cores, and the pass takes
    as long as the slower of them."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._pool: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def __enter__(self) -> _ThreadedHash:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def update(self, block: bytes) -> None:
        self._wait()
        if len(block) < BLOCK // 8:
            self._digest.update(block)
            return
        self._pool = self._pool or ThreadPoolExecutor(1, "sha256")
        self._pending = self._pool.submit(self._digest.update, block)

    def hex(self) -> str:
        self._wait()
        return self._digest.hexdigest()

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None


#: The files that count, by path from the repository's root. A star matches anything but a slash.
HASHED_PATTERNS = (
    "adapter_model.bin",
    "adapter_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.safetensors",
    "model.safetensors",
    "adapter_config.json",
    "config.json",
    "model-*.safetensors",
    "pytorch_model-*.bin",
    "pytorch_model-*.safetensors",
    "checkpoint/last.safetensors",
    "checkpoint/last-*.safetensors",
    "checkpoint/checkpoint-*.safetensors",
    "last-*.safetensors",
    "diffusion_pytorch_model.safetensors",
    "unet/diffusion_pytorch_model.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
    "text_encoder/pytorch_model.bin",
    "text_encoder_2/pytorch_model.bin",
)
_COUNTS = re.compile("|".join(translate(pattern).replace(".*", "[^/]*") for pattern in HASHED_PATTERNS))


def counts_for_hash(path: str) -> bool:
    """Return True if a file of this path is part of the model hash."""
    return _COUNTS.match(path) is not None


def model_hash(files: Mapping[str, tuple[int, str]]) -> str | None:
    """Hash paths with the size and the hexadecimal SHA-256 of their content; None if no file counts. Empty
    files do not, as for validators."""
    outer = hashlib.sha256()
    counted = sorted(path for path, (size, _) in files.items() if size and counts_for_hash(path))
    for path in counted:
        outer.update(f"{path}:{files[path][1]}".encode())
    return outer.hexdigest() if counted else None
