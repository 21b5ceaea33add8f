"""The host around the GPUs: loader processes, the container's walls, the launch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from core.budget import Concession
from core.choices import Engine
from core.hardware import Hardware
from core.plan_parts import ContainerPlan, LaunchPlan, LoaderPlan
from core.planning.wishes import Wish
from core.units import show_bytes

#: What a loader process takes of host memory, and what part of it all of them may take together.
WORKER_BYTES, WORKERS_SHARE = 0.5e9, 0.25
#: Shared memory per GPU where the profile names none, and the part of the host that it may take.
SHM_PER_GPU, SHM_SHARE = 16e9, 0.5
#: The container may not take the whole host: the daemon lives there too.
CONTAINER_SHARE = 0.95


def loader_plan(wish: Wish, hardware: Hardware, world: int) -> LoaderPlan:
    targets, workers = wish.targets, loader_workers(wish, hardware, world)
    if wish.engine is Engine.NATIVE:  # one thread of its own
        return LoaderPlan(
            workers=0,
            pin_memory=targets.dataloader_pin_memory and not hardware.gpus.is_cpu,
            prefetch_factor=targets.dataloader_prefetch_factor,
            persistent_workers=False,
            drop_last=False,
        )
    return LoaderPlan(
        workers=workers,
        pin_memory=targets.dataloader_pin_memory and not hardware.gpus.is_cpu,
        prefetch_factor=targets.dataloader_prefetch_factor if workers else None,
        persistent_workers=targets.dataloader_persistent_workers and workers > 0,
        drop_last=targets.dataloader_drop_last,
    )


def loader_workers(wish: Wish, hardware: Hardware, world: int) -> int:
    sharing = _sharing(hardware, world)
    by_cores = max(hardware.cpu_cores // sharing, 1)
    by_memory = max(int(hardware.memory_bytes * WORKERS_SHARE / WORKER_BYTES) // sharing, 1)
    return min(wish.targets.dataloader_num_workers, by_cores, by_memory)


def _sharing(hardware: Hardware, world: int) -> int:
    """Processes that the host's cores and memory have to do for: jobs on the other GPUs need theirs too."""
    return max(hardware.host_gpus or hardware.gpus.count, world)


def container_plan(wish: Wish, hardware: Hardware, world: int) -> ContainerPlan:
    asked = wish.profile.container
    share = int(hardware.memory_bytes * CONTAINER_SHARE * world / _sharing(hardware, world))
    shm = asked.shm or int(SHM_PER_GPU * world)
    return ContainerPlan(
        memory_bytes=min(asked.memory or share, share),
        shm_bytes=min(shm, int(hardware.memory_bytes * SHM_SHARE)),
        cpus=existing_cores(asked.cpus, hardware.cpu_cores),
    )


def existing_cores(cpus: str | None, cores: int) -> str | None:
    """Docker refuses a set that names a core which is not there."""
    if cpus is None:
        return None
    kept = []
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", cpus):
        first, last = int(low), min(int(high or low), cores - 1)
        if first <= last:
            kept.append(f"{first}-{last}" if last > first else str(first))
    return ",".join(kept) or None


def launch_plan(wish: Wish, world: int) -> LaunchPlan:
    return LaunchPlan(processes=world, port=wish.targets.main_process_port)


def host_concessions(wish: Wish, hardware: Hardware, world: int) -> Iterator[Concession]:
    workers, asked = loader_workers(wish, hardware, world), wish.targets.dataloader_num_workers
    if workers < asked and wish.engine is not Engine.NATIVE:
        memory, sharing = show_bytes(hardware.memory_bytes), _sharing(hardware, world)
        reason = f"{hardware.cpu_cores} cores and {memory} for {sharing} processes"
        yield Concession(field="dataloader_num_workers", wanted=asked, got=workers, reason=reason)
    container, got = wish.profile.container, container_plan(wish, hardware, world)
    whole = f"the host has {show_bytes(hardware.memory_bytes)}"
    if container.memory and got.memory_bytes != container.memory:
        share = f"{whole}, and {world} of {_sharing(hardware, world)} GPUs have their share of it"
        yield _gave(
            "container.memory", show_bytes(container.memory), show_bytes(got.memory_bytes or 0), share
        )
    if container.shm and got.shm_bytes != container.shm:
        yield _gave("container.shm", show_bytes(container.shm), show_bytes(got.shm_bytes or 0), whole)
    if container.cpus and got.cpus != container.cpus:
        yield _gave("container.cpus", container.cpus, got.cpus, f"the host has {hardware.cpu_cores} cores")


def _gave(field: str, wanted: str, got: str | None, reason: str) -> Concession:
    return Concession(field=field, wanted=wanted, got=got, reason=reason)
