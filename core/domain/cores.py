"""Divide a host's cores among its GPUs, so that jobs on different GPUs never share one.

Each GPU gets the same number, near ones first. The division depends on the host and the range alone, not on
running jobs: a job that begins finds its cores free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

from core.domain.hardware import Hardware

#: A physical core: the numbers of its hardware threads.
PhysicalCore = tuple[int, ...]


def cores_in(cpuset: str) -> frozenset[int]:
    """Parse docker's notation: `0-31,64`."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", cpuset)
    return frozenset(core for low, high in spans for core in range(int(low), int(high or low) + 1))


def show_cores(cores: Iterable[int]) -> str:
    """Show cores in docker's notation."""
    spans: list[list[int]] = []
    for core in sorted(cores):
        if spans and core == spans[-1][1] + 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def sharing_gpus(hardware: Hardware, world: int) -> int:
    """Return the GPUs of the host, or the processes if there are none: jobs on other GPUs need cores too."""
    return max(hardware.host_gpus or hardware.gpus.per_node, world)


def job_cores(hardware: Hardware, world: int) -> int:
    """Return the number of cores that a job on `world` of the host's GPUs can count on."""
    return max(hardware.cpu_cores * world // sharing_gpus(hardware, world), 1)


def cores_of_job(wanted: str | None, hardware: Hardware, world: int) -> str | None:
    """Return the cores of a job on `world` GPUs of the host, in docker's notation, or None for no limit.

    `wanted` is the range that all jobs of the host divide. Without one it is all that is known of the host,
    and a job that has the host for itself is not limited.
    """
    if wanted is None and (not hardware.cores or hardware.gpus.is_cpu):
        return None
    cores = hardware.cores or tuple((number,) for number in range(hardware.cpu_cores))
    near = hardware.near_cores or ("",) * sharing_gpus(hardware, world)
    places = hardware.gpu_places or tuple(range(world))
    if wanted is None and len(set(places)) >= len(near):
        return None
    shares = _divide(_within(cores, wanted), near)
    # One share for all where there are fewer cores than GPUs.
    return show_cores({core for place in places if place < len(shares) for core in shares[place]})


def _within(cores: Sequence[PhysicalCore], wanted: str | None) -> tuple[PhysicalCore, ...]:
    """The part of the range that exists, or all cores where none of it does: Docker refuses missing ones."""
    if wanted is None:
        return tuple(cores)
    numbers = cores_in(wanted)
    chosen = (tuple(thread for thread in core if thread in numbers) for core in cores)
    return tuple(core for core in chosen if core) or tuple(cores)


@lru_cache(maxsize=32)
def _divide(cores: tuple[PhysicalCore, ...], near: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of each GPU's cores. Hardware threads of a core stay together, since they share its
    units. Fewer cores than GPUs are not divided."""
    gpus = len(near)
    if len(cores) < gpus:
        every = tuple(thread for core in cores for thread in core)
        return (every,) * gpus
    quotas = [len(part) for part in _parts(cores, gpus)]
    shares: list[list[PhysicalCore]] = [[] for _ in near]
    left = list(cores)
    for place in dict.fromkeys(filter(None, near)):
        nearby, numbers = [index for index in range(gpus) if near[index] == place], cores_in(place)
        beside = [core for core in left if core[0] in numbers]
        for index, part in zip(nearby, _parts(beside, len(nearby)), strict=True):
            shares[index] += part[: quotas[index]]
        taken = {core for index in nearby for core in shares[index]}
        left = [core for core in left if core not in taken]
    for share, quota in zip(shares, quotas, strict=True):
        missing = quota - len(share)
        share += left[:missing]
        del left[:missing]
    return tuple(tuple(thread for core in share for thread in core) for share in shares)


def _parts(cores: Sequence[PhysicalCore], count: int) -> list[list[PhysicalCore]]:
    """Divide cores evenly; neighbours stay together, since they share caches."""
    bounds = [len(cores) * index // count for index in range(count + 1)]
    return [list(cores[low:high]) for low, high in pairwise(bounds)]
