"""Rows into windows: several short documents share one sequence, and none sees another.

Best-fit decreasing, which wastes no more than first-fit decreasing. The windows with the same room left are a
stack, and which rooms exist is one large integer, so finding the tightest one is two bit operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def pack(lengths: Sequence[int] | NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Indices of `lengths`, grouped so that each group's sum is at most `capacity`; longer rows left out."""
    if capacity < 1:
        raise ValueError(f"a window of {capacity} tokens holds nothing")
    sizes = np.asarray(lengths, dtype=np.int64)
    windows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        if size > capacity or size < 1:
            continue
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            window = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
            windows[window].append(index)
        else:
            room, window = capacity, len(windows)
            windows.append([index])
        left = room - size
        if left:
            with_room[left].append(window)
            rooms |= 1 << left
    return windows


def fill_rate(
    lengths: Sequence[int] | NDArray[np.int64], windows: Sequence[Sequence[int]], capacity: int
) -> float:
    """The share of the windows' tokens that are somebody's."""
    sizes = np.asarray(lengths, dtype=np.int64)
    used = sum(int(sizes[index]) for window in windows for index in window)
    return used / (len(windows) * capacity) if windows else 0.0
