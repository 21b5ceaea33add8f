"""Rows held out for evaluation: of all lengths and difficulties, and no near-duplicate of a training row.

A held-out row that is also trained on, with a few words changed, rewards memorising: a small cluster of
near-duplicates is trained on or held out as a whole, and no row is lost. A few hundred random rows measure a
mixed task badly. One row of each of as many parts, alike in length and rarity of tokens, measures as well as
2 (prose) to 10 times as many random ones (six kinds of text mixed), by the losses of a small model.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from trainer.inputs.tokens import IGNORED, Ids

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Places: TypeAlias = NDArray[np.int64]
import hashlib
import math
import re
from array import array
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[np.int64]


#: Tokens of a run; all runs of this many tokens are read, and one in √n of n times as many.
RUN_TOKENS, ALL_RUNS = 4, 200_000
#: Two rows are near-duplicates that share this part of the longer one's runs.
SHARE = 0.5
#: A row with fewer runs is compared by its words alone.
LEAST_RUNS = 3
#: Runs in more than this share and number of rows belong to a template.
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
    """Return the number of each row's cluster: the place of the cluster's first row.

    Near-duplicates have the same words in the same order (their fingerprint), or half of the rarer runs of
    tokens; without `rows` only fingerprints count. A run is a few tokens one after the other, wherever it
    stands; one that many rows share belongs to a template of the data and is ignored. The rarest runs of each
    row are compared first: ten thousand rows of 300 tokens take half a second."""
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
        first, second = divmod(pair, len(rows))
        own, others = (run[starts[place] : starts[place + 1]] for place in (first, second))
        common = len(numpy.intersect1d(own, others, assume_unique=True))
        if common >= SHARE * max(len(own), len(others)):
            yield first, second


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


#: Held out at most, of all rows. A cluster of more than this part of the held-out rows is one of countless
#: copies or of a template: its rows go both ways, as with the validators' own test rows.
MAX_HELD_OUT, LARGE_CLUSTER = 0.2, 0.2


class Split(NamedTuple):
    """Indices of rows, each list in the order of the file."""

    train: list[int]
    held: list[int]


def hold_out(clusters: Sequence[int], answers: Sequence[Ids], count: int, seed: int) -> Split:
    """Hold out at most `count` rows, the same ones for the same seed. `clusters`: of each row, the place of
    its cluster's first row. `answers`: what is learned of each; ignored labels do not count."""
    numpy: Any = importlib.import_module("numpy")
    count = min(count, int(len(clusters) * MAX_HELD_OUT))
    if count < 1:
        return Split(list(range(len(clusters))), [])
    chance = numpy.random.default_rng(seed)
    sizes, most = Counter(clusters), max(int(count * LARGE_CLUSTER), 2)
    clusters = [first if sizes[first] <= most else place for place, first in enumerate(clusters)]
    sizes = Counter(clusters)
    firsts = numpy.array(list(sizes), dtype=numpy.int64)
    wanted = round(count * len(firsts) / len(clusters))
    held, total = set[int](), 0
    for first in _one_of_each_part(firsts[_ordered(answers, firsts, count)], wanted, chance):
        if total + sizes[first] <= count:
            held.add(first)
            total += sizes[first]
    train = [place for place, first in enumerate(clusters) if first not in held]
    return Split(train, [place for place, first in enumerate(clusters) if first in held])


def _ordered(answers: Sequence[Ids], places: Places, count: int) -> Places:
    """The places sorted by length, in parts; within each by how rare the tokens are, up and down in turn:
    what is near in this order is alike."""
    numpy: Any = importlib.import_module("numpy")
    lengths, rarity = _measured([answers[place] for place in places])
    parts = numpy.array_split(numpy.argsort(lengths, kind="stable"), max(round((count / 4) ** 0.5), 1))
    ordered = [part[numpy.argsort(rarity[part], kind="stable")] for part in parts]
    joined: Places = numpy.concatenate([part[:: 1 - 2 * (at % 2)] for at, part in enumerate(ordered)])
    return joined


def _measured(answers: Sequence[Ids]) -> tuple[Any, Any]:
    """Return each answer's number of tokens, and their mean −log frequency in all answers."""
    numpy: Any = importlib.import_module("numpy")
    rows = numpy.repeat(numpy.arange(len(answers), dtype=numpy.int32), [len(ids) for ids in answers])
    tokens = numpy.concatenate([numpy.asarray(ids, dtype=numpy.int32) for ids in answers])
    learned = tokens != IGNORED
    rows, tokens = rows[learned], tokens[learned]
    counts = numpy.bincount(tokens, minlength=1)
    rare = -numpy.log(counts[tokens] / max(len(tokens), 1))
    lengths = numpy.bincount(rows, minlength=len(answers))
    summed = numpy.bincount(rows, weights=rare, minlength=len(answers))
    return lengths, summed / numpy.maximum(lengths, 1)


def _one_of_each_part(places: Places, wanted: int, chance: Any) -> list[int]:
    """A random one of each of so many equal parts, then all others, in case these come to too few rows."""
    numpy: Any = importlib.import_module("numpy")
    bounds = numpy.arange(wanted + 1) * len(places) // max(wanted, 1)
    taken = bounds[:-1] + (chance.random(wanted) * numpy.diff(bounds)).astype(numpy.int64)
    others = numpy.delete(places, taken)
    return [*chance.permutation(places[taken]).tolist(), *chance.permutation(others).tolist()]
