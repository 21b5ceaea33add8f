"""Say when others use the slots of a cluster's node, and keep that stable from scan to scan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from miner.backends.slurm.nodes import AllocatedJob, JobShare, SlurmNode
from miner.fleet.placement import FOREVER

#: A job that is past its end goes on until Slurm has ended it: by how much is only known afterwards.
OVERTIME_S = 60.0
#: What the node counts as used, and no job accounts for.
UNKNOWN_JOB = "?"

Window = tuple[float, float]
#: Node and job → the slots that it was put on.
SlotsOfJobs = dict[tuple[str, str], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class NodeUse:
    """What one job has of a node, in a window."""

    job: str
    share: JobShare
    is_running: bool
    is_ours: bool
    starts_at: float
    ends_at: float


@dataclass(frozen=True, slots=True)
class SlotNeeds:
    """A node's slots, and what a job of ours asks for with each."""

    names: Sequence[str]
    #: The GPUs' type in Slurm; None: pretended ones, which nobody else counts.
    kind: str | None
    cores: int
    memory_bytes: int


def use_by_node(jobs: Iterable[AllocatedJob], own_jobs: str) -> dict[str, list[NodeUse]]:
    use: dict[str, list[NodeUse]] = {}
    for job in jobs:
        is_ours = job.name.startswith(own_jobs)
        for node, share in job.shares.items():
            one = NodeUse(job.id, share, job.is_running, is_ours, job.starts_at, job.ends_at)
            use.setdefault(node, []).append(one)
    return use


def slot_windows(
    node: SlurmNode,
    needs: SlotNeeds,
    use: Sequence[NodeUse],
    bounds: Sequence[Window],
    *,
    whole_node: bool = False,
    before: Mapping[tuple[str, str], tuple[int, ...]],
    is_in_use: Callable[[str], bool],
    now: float,
) -> tuple[list[tuple[Window, ...]], SlotsOfJobs]:
    """The windows of each slot in which it is not ours, and the slots that each job was put on.

    `bounds`: windows in which the whole node is not ours; `whole_node`: a job has all of it, also of its GPUs
    that it did not ask for; `before`: where the jobs were put last time."""
    ours = [index for index, name in enumerate(needs.names) if is_in_use(name)]
    windows: list[list[Window]] = [list(bounds) for _ in needs.names]
    slots: SlotsOfJobs = {}
    if whole_node and ours:
        own = [_with_end(one, now).ends_at for one in use if one.is_running and one.is_ours]
        for slot in set(range(len(needs.names))).difference(ours):
            windows[slot].append((0.0, max(own, default=FOREVER)))

    others = [one for one in use if not one.is_ours]
    kept = {slot for one in others for slot in before.get((node.name, one.job), ())}

    def put(job: str, count: int, window: Window, taken: Callable[[int], bool]) -> None:
        """On slots that are not ours: where it was, else where nobody was, the highest first."""
        had = before.get((node.name, job), ())

        def rank(slot: int) -> tuple[bool, bool, bool, bool, int]:
            return taken(slot), slot in ours, slot not in had, slot in kept, -slot

        chosen = sorted(range(len(needs.names)), key=rank)[:count]
        slots[node.name, job] = tuple(sorted(chosen))
        for slot in chosen:
            windows[slot].append(window)

    blocked: set[int] = set()
    running = [_with_end(one, now) for one in others if one.is_running]
    unknown = _unaccounted(node, needs, use, len(ours))
    if unknown:
        share = JobShare({needs.kind or "": unknown})
        running.append(NodeUse(UNKNOWN_JOB, share, True, False, 0.0, FOREVER))
    together: list[JobShare] = []
    for one in sorted(running, key=lambda one: (-one.ends_at, one.starts_at, one.job)):
        together.append(one.share)
        more = _slots_without(node, needs, together) - len(blocked)
        put(one.job, more, (one.starts_at, one.ends_at), blocked.__contains__)
        blocked.update(slots[node.name, one.job])
    for one in sorted(
        (one for one in others if not one.is_running), key=lambda one: (one.starts_at, one.job)
    ):
        start, end = one.starts_at, one.ends_at
        put(
            one.job,
            _slots_without(node, needs, [one.share]),
            (start, end),
            lambda slot, start=start, end=end: any(  # type: ignore[misc]
                begins < end and start < ends for begins, ends in windows[slot]
            ),
        )
    return [_merged(found) for found in windows], slots


def _with_end(use: NodeUse, now: float) -> NodeUse:
    if use.ends_at > now:
        return use
    ends_at = (now // OVERTIME_S + 2) * OVERTIME_S
    return NodeUse(use.job, use.share, use.is_running, use.is_ours, use.starts_at, ends_at)


def _unaccounted(node: SlurmNode, needs: SlotNeeds, use: Sequence[NodeUse], ours: int) -> int:
    """GPUs in use by jobs that we may not see. A job of ours that began between two of Slurm's answers is
    only known by its slots."""
    if needs.kind is None:
        return 0

    def count(is_ours: bool) -> int:
        return sum(
            one.share.gpus.get(needs.kind or "", 0)
            for one in use
            if one.is_running and one.is_ours is is_ours
        )

    return max(node.gpus_used.get(needs.kind, 0) - count(False) - max(count(True), ours), 0)


def _slots_without(node: SlurmNode, needs: SlotNeeds, shares: Sequence[JobShare]) -> int:
    """How many slots are no use to us beside these: their GPUs are taken, or too few cores or too little
    memory are left for them."""
    count = len(needs.names)
    if any(share.whole_node for share in shares):
        return count
    left = count - sum(_gpus(share, needs.kind) for share in shares)
    left = min(left, (node.cores - sum(share.cores for share in shares)) // needs.cores)
    if node.memory_bytes is not None and needs.memory_bytes:
        memory = node.memory_bytes - sum(share.memory_bytes for share in shares)
        left = min(left, memory // needs.memory_bytes)
    return min(max(count - left, 0), count)


def _gpus(share: JobShare, kind: str | None) -> int:
    """A job that waits may not say which type of GPU it wants."""
    if kind is None:
        return 0
    return share.gpus.get(kind, 0) + (share.gpus.get("", 0) if kind else 0)


def _merged(windows: Iterable[Window]) -> tuple[Window, ...]:
    merged: list[Window] = []
    for start, end in sorted(windows):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)
