"""Clusters of near-duplicate rows: the same words in the same order, or half of the rarer runs of tokens.

A run is a few tokens one after the other, the same wherever it stands; one that many rows share belongs to a
template of the data and is ignored. The rarest runs of each row are compared first: ten thousand rows of
300 tokens take half a second.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from trainer.inputs.tokens import Ids

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[np.int64]

#: Tokens of a run; all runs of this many tokens are read, and one in √n of n times as many.
RUN_TOKENS, ALL_RUNS = 4, 200_000
#: Two rows are near-duplicates that share this part of the longer one's runs.
SHARE = 0.5
#: With fewer runs of its own a row has doubles only where the words are the same.
LEAST_RUNS = 3
#: Runs in more than this share of the rows, and in more than so many, belong to a template.
TEMPLATE, TEMPLATE_ROWS = 0.005, 6
#: Runs of each row that are compared first, and how many of them two rows must share to be compared in full.
SKETCH, SHARED = 16, 2
#: Rows read at a time; a run's hash, beside the number of its row.
_CHUNK, _HASH_BITS = 20_000, 40


def fingerprint(texts: Iterable[str]) -> int:
    """A hash that is the same for texts that differ only in case, blanks and punctuation."""
    words = " ".join(re.findall(r"\w+", " ".join(texts).casefold()))
    return int.from_bytes(hashlib.blake2b(words.encode("utf-8", "replace"), digest_size=8).digest(), "big")


def fingerprint_of_ids(ids: Ids) -> int:
    """A hash that is the same for the same tokens."""
    return int.from_bytes(hashlib.blake2b(array("i", ids).tobytes(), digest_size=8).digest(), "big")


def near_duplicates(rows: Sequence[Ids], fingerprints: Sequence[int]) -> list[int]:
    """Of each row the number of its cluster, which is the place of the cluster's first row. Without rows,
    clusters have the same fingerprint."""
    first_of = list(range(len(fingerprints)))

    def first(place: int) -> int:
        while first_of[place] != place:
            first_of[place] = place = first_of[first_of[place]]
        return place

    def join(one: int, other: int) -> None:
        low, high = sorted((first(one), first(other)))
        first_of[high] = low

    seen: dict[int, int] = {}
    for place, words in enumerate(fingerprints):
        join(place, seen.setdefault(words, place))
    for one, other in _alike(rows) if rows else ():
        join(one, other)
    return [first(place) for place in range(len(fingerprints))]


def _alike(rows: Sequence[Ids]) -> Iterator[tuple[int, int]]:
    """Pairs of rows that share enough runs. Of several alike rows not every pair comes, but a chain."""
    numpy: Any = importlib.import_module("numpy")
    row, run, rows_with = _runs(rows)
    starts = numpy.searchsorted(row, numpy.arange(len(rows) + 1))
    shared = numpy.flatnonzero((rows_with > 1) & (numpy.diff(starts)[row] >= LEAST_RUNS))
    by_rarity = shared[numpy.lexsort((run[shared], rows_with[shared], row[shared]))]
    rank = numpy.arange(len(shared)) - numpy.searchsorted(row[by_rarity], row[by_rarity])
    sample = by_rarity[rank < SKETCH]
    sample = sample[numpy.lexsort((row[sample], run[sample]))]
    near = numpy.flatnonzero(run[sample][1:] == run[sample][:-1])
    both = row[sample[near]] * len(rows) + row[sample[near + 1]]
    pairs, times = numpy.unique(both, return_counts=True)
    for pair in pairs[times >= SHARED].tolist():
        one, other = divmod(pair, len(rows))
        own, others = (run[starts[place] : starts[place + 1]] for place in (one, other))
        common = len(numpy.intersect1d(own, others, assume_unique=True))
        if common >= SHARE * max(len(own), len(others)):
            yield one, other


def _runs(rows: Sequence[Ids]) -> tuple[Numbers, Numbers, Numbers]:
    """The runs of each row that are no template's: the row, the run's hash, and how many rows have it."""
    numpy: Any = importlib.import_module("numpy")
    one_in = max(math.ceil(math.sqrt(sum(map(len, rows)) / ALL_RUNS)), 1)
    parts = [_runs_of(rows[start : start + _CHUNK], start, one_in) for start in range(0, len(rows), _CHUNK)]
    packed = numpy.concatenate(parts) if parts else numpy.zeros(0, dtype=numpy.int64)
    row, run = packed >> _HASH_BITS, packed & ((1 << _HASH_BITS) - 1)
    _, known, counts = numpy.unique(run, return_inverse=True, return_counts=True)
    rows_with = counts[known]
    rare = rows_with <= max(len(rows) * TEMPLATE, TEMPLATE_ROWS)
    return row[rare], run[rare], rows_with[rare]


def _runs_of(rows: Sequence[Ids], first: int, one_in: int) -> Numbers:
    """Row and hash in one number each, sorted and each once."""
    numpy: Any = importlib.import_module("numpy")
    lengths = numpy.array([len(ids) for ids in rows])
    tokens = numpy.concatenate([numpy.asarray(ids, dtype=numpy.uint64) for ids in rows])
    row = numpy.repeat(numpy.arange(first, first + len(rows)), lengths)
    ends = max(len(tokens) - RUN_TOKENS + 1, 0)
    run = numpy.zeros(ends, dtype=numpy.uint64)
    for at in range(RUN_TOKENS):
        run = (run ^ tokens[at : at + ends]) * numpy.uint64(0x9E3779B97F4A7C15)
        run ^= run >> numpy.uint64(29)
    kept = (row[:ends] == row[RUN_TOKENS - 1 :][:ends]) & (run % numpy.uint64(one_in) == 0)
    hashes = (run[kept] >> numpy.uint64(64 - _HASH_BITS)).astype(numpy.int64)
    packed: Numbers = numpy.sort((row[:ends][kept] << _HASH_BITS) | hashes)
    return packed[numpy.diff(packed, prepend=-1) != 0]
