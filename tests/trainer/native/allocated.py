"""Measure the memory that a call allocates."""

from __future__ import annotations

from collections.abc import Callable

import torch

#: Allocated between the two calls, to find the start of the second in the list of all allocations.
_MARK = 1_234_567


def bytes_allocated(
    work: Callable[[], object], before: Callable[[], object] = lambda: None, mapped: int = 0
) -> int:
    """Return the peak of `work` in this thread, on top of `before`; a mapped file of `mapped` bytes is left
    out. Of earlier memory only that of `before` counts when freed."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as seen:
        first = before()
        torch.empty(_MARK, dtype=torch.uint8)
        kept = work()
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    events = seen.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    held = most = 0
    for size in sizes[sizes.index(_MARK) :]:
        held += size if abs(size) not in (_MARK, mapped) else 0
        most = max(most, held)
    del first, kept
    return most
