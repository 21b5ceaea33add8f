"""Rows held out for evaluation, without near-duplicates among the rows that are trained on.

A held-out row that is also in the training data, with a few words changed, rewards memorising. Duplicates are
found by the words of a row, and by short runs of tokens that two rows share; a run that many rows share is a
template of the data and is ignored. All rows are read once, in about a second for every ten thousand.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trainer.inputs.tokens import Ids

#: Tokens of a run, and one in how many tokens begins one: in much data fewer do, or this would take minutes.
RUN_TOKENS = 4
SPARSE = ((4_000_000, 4), (16_000_000, 8), (float("inf"), 16))
#: A row is a near-duplicate of another that has this share of its runs.
SHARE = 0.5
#: With fewer runs of its own a row has doubles only where the words are the same.
MIN_RUNS = 3
#: Runs in more than this share of the candidates belong to a template.
TEMPLATE = 0.02
#: Held out at most, of all rows; and rows that may be left out as too similar to a held-out one.
MAX_HELD_OUT, MAX_LEFT_OUT = 0.2, 0.1
#: Candidates for each row that is wanted.
CANDIDATES = 3


class Split(NamedTuple):
    """Indices of rows, each list in the order of the file."""

    train: list[int]
    held: list[int]
    #: In neither: too similar to a held-out row.
    left_out: list[int]


def fingerprint(texts: Iterable[str]) -> int:
    """A hash that is the same for texts that differ only in case, blanks and punctuation."""
    words = " ".join(re.findall(r"\w+", " ".join(texts).casefold()))
    return int.from_bytes(hashlib.blake2b(words.encode("utf-8", "replace"), digest_size=8).digest(), "big")


def hold_out(rows: Sequence[Ids], fingerprints: Sequence[int], count: int, seed: int) -> Split:
    """Hold out at most `count` rows, the same for the same seed, preferably rows without duplicates."""
    count = min(count, int(len(rows) * MAX_HELD_OUT))
    if count < 1:
        return Split(list(range(len(rows))), [], [])
    shuffled = random.Random(seed).sample(range(len(rows)), len(rows))  # noqa: S311 - a split is no secret
    candidates = shuffled[: max(CANDIDATES * count, 50)]
    doubles = _doubles(rows, fingerprints, candidates)
    held = [candidate for candidate in candidates if not doubles[candidate]][:count]
    left_out: set[int] = set()
    for candidate in candidates:
        if len(held) == count:
            break
        more = doubles[candidate] - left_out
        # A row that is held out already may have doubles in neither part.
        if (
            doubles[candidate]
            and candidate not in left_out
            and len(left_out) + len(more) <= len(rows) * MAX_LEFT_OUT
        ):
            held.append(candidate)
            left_out |= more
    kept = set(held)
    left_out -= kept
    train = [place for place in range(len(rows)) if place not in kept and place not in left_out]
    return Split(train, sorted(held), sorted(left_out))


def token_runs(ids: Ids, sparse: int = SPARSE[0][1]) -> set[int]:
    """Hashes of some of a row's runs of tokens, the same ones wherever the run stands."""
    last = len(ids) - RUN_TOKENS
    starts = [at for at, token in enumerate(ids) if token % sparse == 0 and at <= last]
    return {hash(tuple(ids[at : at + RUN_TOKENS])) for at in starts} or {hash(tuple(ids))}


def _doubles(
    rows: Sequence[Ids], fingerprints: Sequence[int], candidates: Sequence[int]
) -> dict[int, set[int]]:
    """For each candidate, the other rows that are nearly the same."""
    tokens = sum(len(ids) for ids in rows)
    sparse = next(each for most, each in SPARSE if tokens <= most)
    own = {candidate: token_runs(rows[candidate], sparse) for candidate in candidates}
    common = Counter(run for runs in own.values() for run in runs)
    most = max(len(candidates) * TEMPLATE, 4)
    candidates_with: dict[int, list[int]] = {}
    for candidate, runs in own.items():
        rare = {run for run in runs if common[run] <= most}
        own[candidate] = rare if len(rare) >= MIN_RUNS else set()
        for run in own[candidate]:
            candidates_with.setdefault(run, []).append(candidate)
    same: dict[int, list[int]] = {}
    for candidate in candidates:
        same.setdefault(fingerprints[candidate], []).append(candidate)
    doubles: dict[int, set[int]] = {candidate: set() for candidate in candidates}
    for place, ids in enumerate(rows):
        hits = Counter(
            candidate for run in token_runs(ids, sparse) for candidate in candidates_with.get(run, ())
        )
        near = [candidate for candidate, shared in hits.items() if shared >= SHARE * len(own[candidate])]
        for candidate in (*near, *same.get(fingerprints[place], ())):
            if candidate != place:
                doubles[candidate].add(place)
    return doubles
