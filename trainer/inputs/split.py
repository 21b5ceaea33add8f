"""Rows held out for evaluation, without near-duplicates among the rows that are trained on.

A held-out row that is in the training data as well, a few words changed, rewards a model for learning by
heart. Duplicates are found by the words of a row, and by short runs of tokens that two rows share; a run
that many rows share is a template of the data and tells nothing. All rows are passed over once, in about
a second for every ten thousand.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trainer.inputs.rows import Ids

#: Tokens of a run, and one in how many tokens begins one: in much data fewer do, or this would take minutes.
RUN = 4
SPARSE = ((4_000_000, 4), (16_000_000, 8), (float("inf"), 16))
#: A row is a near-duplicate of another that has this share of its runs.
SHARE = 0.5
#: With fewer runs of its own a row has doubles only where the words are the same.
LEAST_RUNS = 3
#: Runs in more than this share of the looked-at rows belong to a template.
TEMPLATE = 0.02
#: Held out at most, of all rows; and rows that may be left out because a held-out one is so like them.
MOST_HELD, MOST_LEFT_OUT = 0.2, 0.1
#: Candidates looked at for each row that is wanted.
CANDIDATES = 3


class Split(NamedTuple):
    """Places of rows, each in the order of the file."""

    train: list[int]
    held: list[int]
    #: In neither: so like a held-out row that they would give it away.
    left_out: list[int]


def fingerprint(texts: Iterable[str]) -> int:
    """The same for texts that differ in case, blanks and punctuation only."""
    words = " ".join(re.findall(r"\w+", " ".join(texts).casefold()))
    return int.from_bytes(hashlib.blake2b(words.encode("utf-8", "replace"), digest_size=8).digest(), "big")


def hold_out(rows: Sequence[Ids], fingerprints: Sequence[int], count: int, seed: int) -> Split:
    """`count` rows at most, the same for the same seed. Rows without a double are preferred."""
    count = min(count, int(len(rows) * MOST_HELD))
    if count < 1:
        return Split(list(range(len(rows))), [], [])
    shuffled = random.Random(seed).sample(range(len(rows)), len(rows))  # noqa: S311 - a split is no secret
    candidates = shuffled[: max(CANDIDATES * count, 50)]
    doubles = _doubles(rows, fingerprints, candidates)
    held = [one for one in candidates if not doubles[one]][:count]
    left_out: set[int] = set()
    for one in candidates:
        if len(held) == count:
            break
        more = doubles[one] - left_out
        # A row that is held out already may have doubles in neither part.
        if doubles[one] and one not in left_out and len(left_out) + len(more) <= len(rows) * MOST_LEFT_OUT:
            held.append(one)
            left_out |= more
    kept = set(held)
    left_out -= kept
    train = [place for place in range(len(rows)) if place not in kept and place not in left_out]
    return Split(train, sorted(held), sorted(left_out))


def runs(ids: Ids, sparse: int = SPARSE[0][1]) -> set[int]:
    """Hashes of some of a row's runs of tokens, the same ones wherever the run stands."""
    last = len(ids) - RUN
    starts = [at for at, one in enumerate(ids) if one % sparse == 0 and at <= last]
    return {hash(tuple(ids[at : at + RUN])) for at in starts} or {hash(tuple(ids))}


def _doubles(
    rows: Sequence[Ids], fingerprints: Sequence[int], candidates: Sequence[int]
) -> dict[int, set[int]]:
    """Of each candidate, the other rows that are nearly the same."""
    tokens = sum(len(ids) for ids in rows)
    sparse = next(each for most, each in SPARSE if tokens <= most)
    own = {one: runs(rows[one], sparse) for one in candidates}
    common = Counter(run for found in own.values() for run in found)
    most = max(len(candidates) * TEMPLATE, 4)
    where: dict[int, list[int]] = {}
    for one, found in own.items():
        rare = {run for run in found if common[run] <= most}
        own[one] = rare if len(rare) >= LEAST_RUNS else set()
        for run in own[one]:
            where.setdefault(run, []).append(one)
    same: dict[int, list[int]] = {}
    for one in candidates:
        same.setdefault(fingerprints[one], []).append(one)
    doubles: dict[int, set[int]] = {one: set() for one in candidates}
    for place, ids in enumerate(rows):
        hits = Counter(one for run in runs(ids, sparse) for one in where.get(run, ()))
        near = [one for one, shared in hits.items() if shared >= SHARE * len(own[one])]
        for one in (*near, *same.get(fingerprints[place], ())):
            if one != place:
                doubles[one].add(place)
    return doubles
