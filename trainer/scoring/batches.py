"""Rows in batches of alike length: the same numbers as row by row, several times as fast."""

from __future__ import annotations

from collections.abc import Sequence

#: Tokens of a pass, padding included: enough to keep a large GPU busy with any model.
MOST_TOKENS = 16_384
#: Bytes that the logits of a pass may take, with the copy that the loss makes.
LOGIT_BYTES = 4 << 30


def batch_tokens(vocabulary: int, bytes_each: int = 4) -> int:
    """How many tokens a pass may have before its logits outgrow their share of the memory."""
    return max(min(MOST_TOKENS, LOGIT_BYTES // (vocabulary * 2 * bytes_each)), 1)


def batches(lengths: Sequence[int], most_tokens: int) -> list[list[int]]:
    """Places of rows, longest first: what does not fit shows at once. Every batch has at least one row."""
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    found: list[list[int]] = []
    for place in order:
        if found and (len(found[-1]) + 1) * lengths[found[-1][0]] <= most_tokens:
            found[-1].append(place)
        else:
            found.append([place])
    return found


def share(found: Sequence[list[int]], rank: int, world: int) -> list[tuple[list[int], bool]]:
    """A rank's batches, and whether each counts: all ranks make equally many, as sharded models need."""
    rounds = -(-len(found) // world)
    mine = [found[at] for at in range(rank, len(found), world)]
    padding = [(mine or [list(found[0])])[-1]] * (rounds - len(mine)) if found else []
    return [(one, True) for one in mine] + [(one, False) for one in padding]
