"""What the nodes offer that a job could run on: their CPUs, memory and GPUs, and the longest time allowed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from miner.backends.slurm.commands import SlurmCommands, SlurmRefused
from miner.backends.slurm.nodes import NO_LIMIT, SlurmNode, SlurmPartition, parse_nodes, parse_partitions

#: How long an answer is taken as current.
FRESH_S = 300.0


@dataclass(frozen=True, slots=True)
class NodeSize:
    """The least of several nodes."""

    cpus: int
    memory_bytes: int
    #: Of the type that a node has most of; which one, where a node has others too.
    gpus: int
    gpu_type: str
    #: The partition's longest time; None: no limit.
    limit_s: float | None


class NodeSizes:
    def __init__(self, commands: SlurmCommands) -> None:
        self._commands = commands
        self._known: dict[tuple[str, str], tuple[NodeSize | None, float]] = {}

    async def least(self, nodes: Sequence[str], partition: str) -> NodeSize | None:
        """The least of these nodes, or of the whole partition; None: there is no such node."""
        key = (",".join(nodes), partition)
        size, until = self._known.get(key, (None, 0.0))
        if time.monotonic() < until:
            return size
        show = ("--all", "--oneliner", "show")
        try:
            found = await self._commands.run("scontrol", *show, "nodes", *[key[0]] * bool(nodes))
            partitions = await self._commands.run("scontrol", *show, "partitions")
        except SlurmRefused:
            return None  # there is no such node; sbatch says so too
        size = least_size(parse_nodes(found), parse_partitions(partitions), partition, bool(nodes))
        self._known[key] = size, time.monotonic() + FRESH_S
        return size

    async def one_of(self, nodes: str, partition: str) -> tuple[str, ...]:
        """One of these nodes (as Slurm writes several), with room if there is one; none: there is no such
        node."""
        chosen = [f"--nodes={nodes}"] + [f"--partition={partition}"] * bool(partition)
        text = await self._commands.run("sinfo", "--noheader", "--Node", "--format=%N %t", *chosen)
        states = dict(line.split()[:2] for line in text.splitlines() if " " in line)
        free = (node for node, state in states.items() if state in ("idle", "mix"))
        return tuple(filter(None, [next(free, next(iter(states), ""))]))


def least_size(
    nodes: Sequence[SlurmNode], partitions: Sequence[SlurmPartition], named: str, chosen: bool
) -> NodeSize | None:
    """`named`: the partitions, with commas; none: the default one. `chosen`: these nodes, whatever their
    partition."""
    names = set(named.split(",")) if named else {one.name for one in partitions if one.is_default}
    usable = [node for node in nodes if chosen or node.partitions & names]
    if not usable:
        return None
    limits = [one.longest_s for one in partitions if one.name in names and one.longest_s != NO_LIMIT]
    mixed = [node for node in usable if len(node.gpus) > 1]
    return NodeSize(
        min(node.cores for node in usable),
        min(node.memory_bytes or 0 for node in usable),
        min(max(node.gpus.values(), default=0) for node in usable),
        mixed[0].main_gpu_type if mixed else "",
        min(limits, default=None),
    )
