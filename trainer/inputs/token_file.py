"""Rows of tokens on disk: written once, mapped by any number of processes, never loaded whole."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainer.errors import BadData

VERSION = 1
META_FILE = "meta.json"
#: Rows checked against the vocabulary at a time.
_CHECKED_AT_ONCE = 1 << 24
#: Tokens sampled to distinguish files.
_SAMPLED = 1 << 12

Ids: TypeAlias = NDArray[np.generic]


class BadTokens(BadData):
    """A token file that is damaged, or of another model."""

    code = "bad_tokens"


class TokenRow(NamedTuple):
    ids: Ids
    #: Whether predicting this token counts.
    trained: NDArray[np.bool_]


def width_of(vocabulary: int) -> np.dtype[Any]:
    """Two bytes are enough for most vocabularies and halve what is read."""
    return np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)


class TokenWriter:
    """Appends rows; `close` makes the folder visible. Left without `close`, nothing is."""

    def __init__(self, folder: Path, vocabulary: int, about: dict[str, Any] | None = None) -> None:
        """`about`: more for the folder's own description."""
        self._folder, self._vocabulary, self._about = folder, vocabulary, about or {}
        self._unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished.mkdir(parents=True)
        self._ids = (self._unfinished / "ids.bin").open("wb")
        self._trained = (self._unfinished / "trained.bin").open("wb")
        self._ends: list[int] = []
        self._dtype = width_of(vocabulary)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._ids.close()
            self._trained.close()
            shutil.rmtree(self._unfinished, ignore_errors=True)

    @property
    def tokens(self) -> int:
        return self._ends[-1] if self._ends else 0

    def add(
        self, ids: Sequence[int] | Ids, trained: Sequence[bool] | NDArray[np.bool_] | None = None
    ) -> None:
        """Write one row. `trained`: which of its tokens are learned; by default all."""
        row = np.asarray(ids, dtype=np.int64)
        counts = np.ones(len(row), np.bool_) if trained is None else np.asarray(trained, dtype=np.bool_)
        if row.shape != counts.shape or row.ndim != 1:
            raise BadTokens(f"a row of {row.size} tokens came with {counts.size} marks; one each is needed")
        if row.size and not 0 <= int(row.min()) <= int(row.max()) < self._vocabulary:
            worst = int(row.max() if row.max() >= self._vocabulary else row.min())
            raise BadTokens(f"token {worst} is outside the vocabulary of {self._vocabulary}")
        self._ids.write(row.astype(self._dtype).tobytes())
        self._trained.write(counts.tobytes())
        self._ends.append(self.tokens + row.size)

    def close(self) -> None:
        np.asarray(self._ends, dtype=np.int64).tofile(self._unfinished / "ends.bin")
        for file in (self._ids, self._trained):
            _to_disk(file)
        meta = {
            "version": VERSION,
            "vocabulary": self._vocabulary,
            "dtype": self._dtype.name,
            "rows": len(self._ends),
            "tokens": self.tokens,
            **self._about,
        }
        (self._unfinished / META_FILE).write_text(json.dumps(meta))
        shutil.rmtree(self._folder, ignore_errors=True)
        self._unfinished.rename(self._folder)


class TokenFile:
    """Rows of tokens, mapped. Opening checks that the files are as long as they claim."""

    def __init__(
        self,
        ids: Ids,
        trained: NDArray[np.bool_] | None,
        ends: NDArray[np.int64],
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        """`lengths`: of rows that do not follow one another without a gap."""
        self._ids, self._trained, self._ends = ids, trained, ends
        self.lengths: NDArray[np.int64] = np.diff(ends, prepend=0) if lengths is None else lengths

    @classmethod
    def open(cls, folder: Path, vocabulary: int) -> Self:
        """Open a folder that `TokenWriter` made, for a model with this many tokens."""
        try:
            meta = json.loads((folder / META_FILE).read_text())
            made_for, dtype = int(meta["vocabulary"]), np.dtype(meta["dtype"])
            rows, tokens = int(meta["rows"]), int(meta["tokens"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadTokens(f"{folder} is not a token folder ({error}); write it again") from error
        if meta.get("version") != VERSION:
            raise BadTokens(f"{folder} has version {meta.get('version')!r}, not {VERSION}; write it again")
        if made_for > vocabulary:
            raise BadTokens(
                f"{folder} was made for {made_for} tokens and the model has {vocabulary}: another tokenizer's"
            )
        ids = _mapped(folder / "ids.bin", dtype, tokens)
        trained = _mapped(folder / "trained.bin", np.dtype(np.bool_), tokens)
        ends = np.asarray(_mapped(folder / "ends.bin", np.dtype(np.int64), rows))
        if rows and (int(ends[-1]) != tokens or bool((np.diff(ends, prepend=0) < 0).any())):
            raise BadTokens(f"{folder}/ends.bin does not end {rows} rows of {tokens} tokens; write it again")
        return cls(ids, trained, ends)

    @classmethod
    def stream(
        cls, path: Path, vocabulary: int, length: int, dtype: str = "uint16", *, check: bool = True
    ) -> Self:
        """A plain file of tokens, cut into rows of `length`; a shorter rest is left out. To `check` that each
        of them is one of the vocabulary reads the whole file."""
        width = np.dtype(dtype)
        size = path.stat().st_size if path.is_file() else 0
        if not size or size % width.itemsize:
            raise BadTokens(f"{path} has {size} bytes, which is not a whole number of {width.name} tokens")
        ids = _mapped(path, width, size // width.itemsize)
        for start in range(0, len(ids) if check else 0, _CHECKED_AT_ONCE):
            largest = int(ids[start : start + _CHECKED_AT_ONCE].max())
            if largest >= vocabulary:
                raise BadTokens(
                    f"{path} holds token {largest}; the model has {vocabulary}: another tokenizer's"
                )
        rows = len(ids) // length
        if not rows:
            raise BadTokens(f"{path} has {len(ids)} tokens, fewer than one row of {length}")
        return cls(ids, None, np.arange(1, rows + 1, dtype=np.int64) * length)

    def cut(self, length: int) -> Self:
        """The same tokens in rows of `length` at most. Nothing is copied but where rows end."""
        pieces = -(-self.lengths // length)
        row = np.repeat(np.arange(len(self)), pieces)
        place = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = (self._ends - self.lengths)[row] + place * length
        ends = np.minimum(starts + length, self._ends[row])
        return type(self)(self._ids, self._trained, ends, ends - starts)

    def part(self, rows: NDArray[np.int64]) -> Self:
        """Some of the rows, in this order."""
        return type(self)(self._ids, self._trained, self._ends[rows], self.lengths[rows])

    def fingerprint(self) -> tuple[int, ...]:
        """Equal for equal rows, almost certainly: from their lengths and a sample of their tokens."""
        sample = np.ascontiguousarray(self._ids[:: max(len(self._ids) // _SAMPLED, 1)])
        return len(self), int(self.lengths.sum()), zlib.crc32(self.lengths), zlib.crc32(sample)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> TokenRow:
        end = int(self._ends[index])
        start = end - int(self.lengths[index])
        ids = self._ids[start:end]
        if self._trained is None:
            return TokenRow(ids, np.ones(end - start, dtype=np.bool_))
        return TokenRow(ids, self._trained[start:end])


def write_rows(
    folder: Path, vocabulary: int, rows: Iterable[tuple[Sequence[int], Sequence[bool]]]
) -> TokenFile:
    with TokenWriter(folder, vocabulary) as writer:
        for ids, trained in rows:
            writer.add(ids, trained)
    return TokenFile.open(folder, vocabulary)


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> Any:
    size = path.stat().st_size if path.is_file() else -1
    if size != count * dtype.itemsize:
        raise BadTokens(
            f"{path} has {size} bytes where {count} × {dtype.itemsize} belong: cut off; write it again"
        )
    return np.memmap(path, dtype=dtype, mode="r") if count else np.zeros(0, dtype=dtype)


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
