"""How much memory something takes."""

from __future__ import annotations

from collections.abc import Callable

import torch

#: Allocated in between, so that the list of all allocations shows where one thing ends and the next begins.
_MARK = 1_234_567


def bytes_allocated(
    work: Callable[[], object], before: Callable[[], object] = lambda: None, mapped: int = 0
) -> int:
    """The most at a time in this thread, beside what was there at first; without a file of so many bytes that
    is mapped. Only what was allocated by `before` is seen to be freed."""
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
