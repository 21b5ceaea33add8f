"""What the nodes offer that a job could run on: their CPUs, memory and GPUs, and the longest time allowed."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

from miner.slurm.commands import SlurmCommands

#: How long an answer is taken as current.
FRESH_S = 300.0


@dataclass(frozen=True, slots=True)
class NodeSize:
    """The least of several nodes."""

    cpus: int
    memory_bytes: int
    gpus: int
    #: The partition's longest time; None: no limit.
    limit_s: float | None


class NodeSizes:
    def __init__(self, commands: SlurmCommands) -> None:
        self._commands = commands
        self._known: dict[tuple[str, str], tuple[NodeSize | None, float]] = {}

    async def least(self, nodes: Iterable[str], partition: str) -> NodeSize | None:
        """The least of these nodes, or of the whole partition; None: there is no such node."""
        key = (",".join(nodes), partition)
        size, until = self._known.get(key, (None, 0.0))
        if time.monotonic() < until:
            return size
        chosen = [
            f"--{name}={value}" for name, value in zip(("nodes", "partition"), key, strict=True) if value
        ]
        text = await self._commands.run("sinfo", "--noheader", "--exact", "--format=%c|%m|%G|%l|%P", *chosen)
        size = least_size(text, any_partition=bool(partition))
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


def least_size(text: str, *, any_partition: bool = True) -> NodeSize | None:
    """From sinfo's lines `cpus|megabytes|gres|time limit|partition`. Where no partition was named, only the
    default one's, which ends with `*`, if it is among them."""
    lines = [line.strip().split("|") for line in text.splitlines() if line.count("|") == 4]
    default = [line for line in lines if line[4].endswith("*")]
    lines = lines if any_partition else default or lines
    if not lines:
        return None
    limits = [limit for line in lines if (limit := time_limit(line[3])) is not None]
    return NodeSize(
        min(_number(line[0]) for line in lines),
        min(_number(line[1]) for line in lines) << 20,
        min(gpu_count(line[2]) for line in lines),
        min(limits, default=None),
    )


def gpu_count(gres: str) -> int:
    """Of `gpu:h100:4(S:0-1),gpu:a100:2,nvme:1`: 6."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres))


def time_limit(text: str) -> float | None:
    """Seconds of `1-02:03:04`, `02:03:04`, `03:04` (minutes and seconds); None for `infinite`."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if found is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + rest


def _number(text: str) -> int:
    return int(re.sub(r"\D", "", text) or 0)
