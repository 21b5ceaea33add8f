"""Cards that nobody looks at: as a setting or a file names them."""

from __future__ import annotations

from collections.abc import Sequence

from core.hardware import GpuSet, Link
from miner.fleet.base import CPU_ID
from miner.fleet.looks import Look, Seen


class FixedSource:
    def __init__(self, gpus: GpuSet, source: str, ids: Sequence[str] = ()) -> None:
        """Cards without an id are called by their index, as engines take it too."""
        names = [*ids[: gpus.count], *(_name(gpus, index) for index in range(len(ids), gpus.count))]
        cards = (Seen(name, at, gpus.kind, _linked(gpus, names, at)) for at, name in enumerate(names))
        self._look = Look(tuple(cards), source=source)

    async def look(self) -> Look:
        return self._look

    async def close(self) -> None:
        """Nothing is open."""


def _name(gpus: GpuSet, index: int) -> str:
    if not gpus.is_cpu:
        return str(index)
    return CPU_ID if index == 0 else f"{CPU_ID}:{index}"


def _linked(gpus: GpuSet, names: Sequence[str], index: int) -> frozenset[str]:
    if gpus.kind.link is Link.NVLINK:
        return frozenset(names) - {names[index]}
    other = index ^ 1
    if gpus.kind.link is Link.NVLINK_PAIR and other < gpus.count:
        return frozenset({names[other]})
    return frozenset()
