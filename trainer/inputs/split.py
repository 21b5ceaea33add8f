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
    each = numpy.array(list(sizes), dtype=numpy.int64)
    wanted = round(count * len(each) / len(clusters))
    held, total = set[int](), 0
    for first in _one_of_each_part(each[_ordered(answers, each, count)], wanted, chance):
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
    """Of each answer the number of its tokens, and their mean −log frequency in all answers."""
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
