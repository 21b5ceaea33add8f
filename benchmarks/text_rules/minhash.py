"""Near-duplicates by MinHash, as the winner of `benchmarks/text_rules.py` finds them."""

from __future__ import annotations

import random
import zlib
from collections import defaultdict
from collections.abc import Sequence

import numpy

SHINGLE, HASHES, BANDS, JACCARD = 5, 64, 16, 0.8
_PRIME = (1 << 31) - 1


def groups_of(texts: Sequence[str]) -> list[list[int]]:
    """Places of texts that are nearly the same together, in order."""
    chance = random.Random(0)
    pairs = [(chance.randrange(1, _PRIME), chance.randrange(_PRIME)) for _ in range(HASHES)]
    factors, shifts = (numpy.array(each, dtype=numpy.uint64)[:, None] for each in zip(*pairs, strict=True))
    signatures = [_signature(text, factors, shifts) for text in texts]
    parent = list(range(len(texts)))

    def root(place: int) -> int:
        while parent[place] != place:
            parent[place] = parent[parent[place]]
            place = parent[place]
        return place

    rows = HASHES // BANDS
    for band in range(BANDS):
        seen: dict[bytes, int] = {}
        for place, signature in enumerate(signatures):
            key = signature[band * rows : (band + 1) * rows].tobytes()
            other = seen.setdefault(key, place)
            if other != place and (signature == signatures[other]).mean() >= JACCARD:
                parent[root(place)] = root(other)
    groups: dict[int, list[int]] = defaultdict(list)
    for place in range(len(texts)):
        groups[root(place)].append(place)
    return list(groups.values())


def _signature(text: str, factors: numpy.ndarray, shifts: numpy.ndarray) -> numpy.ndarray:
    pieces = {text[at : at + SHINGLE] for at in range(max(len(text) - SHINGLE + 1, 1))}
    hashes = numpy.array([zlib.crc32(piece.encode()) for piece in pieces], dtype=numpy.uint64)
    return ((factors * hashes + shifts) % numpy.uint64(_PRIME)).min(axis=1)
