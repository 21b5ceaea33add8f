"""One pass over a file: its SHA-256, and for weights whether every number in them is finite."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from core.submission.folder import identity, open_plain
from core.submission.numbers import finite_test
from core.submission.safetensors import Header, Tensor, read_header

#: A multiple of every item's size; larger ones fall out of the processor's cache.
PIECE = 2 << 20
#: Enough to tell what is wrong without a page of it.
MAX_NAMED = 3

#: Bytes that have been gone through since the last call.
Told = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Weighed:
    sha256: str
    size: int
    #: Tensors with a NaN or an infinity: the first few, and how many in all.
    not_finite: tuple[str, ...] = ()
    not_finite_count: int = 0
    header: Header | None = None


def weigh(path: Path, told: Told | None = None, *, plain: bool = False) -> Weighed:
    """Read a file once, whatever its size, in constant memory. `BadHeader` for weights that are none,
    `OSError` for what cannot be read or changes meanwhile. With `plain` weights are just a file too."""
    with open(open_plain(path), "rb", buffering=0) as file, _Hash() as digest:
        before = identity(os.fstat(file.fileno()))
        if path.name.endswith(".safetensors") and not plain:
            found = _weights(file, digest, told)
        else:
            for piece in _pieces(file, before[2], told):
                digest.update(piece)
            found = Weighed(digest.hex(), before[2])
        if identity(os.fstat(file.fileno())) != before:
            raise OSError(f"{path.name} was written to while it was read")
        return found


def _weights(file: BinaryIO, digest: _Hash, told: Told | None) -> Weighed:
    header = read_header(file)
    file.seek(0)
    for piece in _pieces(file, header.data_at, told):
        digest.update(piece)
    bad: list[str] = []
    for tensor in sorted(header.tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        if not _is_finite(tensor, file, digest, told):
            bad.append(tensor.name)
    return Weighed(digest.hex(), header.size, tuple(bad[:MAX_NAMED]), len(bad), header)


def _is_finite(tensor: Tensor, file: BinaryIO, digest: _Hash, told: Told | None) -> bool:
    test, good = finite_test(tensor.dtype), True
    for piece in _pieces(file, tensor.end - tensor.begin, told):
        digest.update(piece)
        if test is not None and good and test(piece):
            good = False
    return good


def _pieces(file: BinaryIO, count: int, told: Told | None) -> Iterator[bytes]:
    while count > 0:
        piece = _read(file, min(PIECE, count))
        count -= len(piece)
        if told is not None:
            told(len(piece))
        yield piece


def _read(file: BinaryIO, count: int) -> bytes:
    piece = file.read(count)
    while len(piece) < count:
        more = file.read(count - len(piece))
        if not more:
            raise OSError("the file was cut while it was read")
        piece += more
    return piece


class _Hash:
    """SHA-256 in a thread of its own: it lets go of the interpreter, so search and hash take turns on two
    cores and the pass costs what the slower of them does."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._pool: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def __enter__(self) -> _Hash:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def update(self, piece: bytes) -> None:
        self._wait()
        if len(piece) < PIECE // 8:
            self._digest.update(piece)
            return
        self._pool = self._pool or ThreadPoolExecutor(1, "sha256")
        self._pending = self._pool.submit(self._digest.update, piece)

    def hex(self) -> str:
        self._wait()
        return self._digest.hexdigest()

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None
