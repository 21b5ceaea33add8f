"""Let several processes act as one: rank 0 decides, and what one rank saw all get to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Communicator:
    """Over the process group that the engine has set up; one process agrees with itself.

    Every method is called by all ranks at the same point, or by none."""

    rank: int = 0
    world: int = 1
    device: Any = None

    def from_first(self, values: Sequence[float]) -> list[float]:
        """Rank 0's numbers, on every rank."""
        if self.world == 1:
            return list(values)
        import torch
        import torch.distributed as dist

        numbers = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.broadcast(numbers, src=0)
        return [float(value) for value in numbers.tolist()]

    def sum(self, *numbers: float) -> list[float]:
        """Each number summed over all ranks."""
        if self.world == 1:
            return list(numbers)
        import torch
        import torch.distributed as dist

        summed = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(summed)
        return [float(number) for number in summed.tolist()]

    def any(self, flag: bool) -> bool:
        return self.sum(float(flag))[0] > 0

    def gather(self, values: Sequence[float]) -> list[float]:
        """The numbers of all ranks in order of rank; every rank brings as many as it likes."""
        if self.world == 1:
            return list(values)
        import torch.distributed as dist

        parts: list[list[float]] = [[] for _ in range(self.world)]
        dist.all_gather_object(parts, list(values))
        return [value for part in parts for value in part]

    def barrier(self) -> None:
        if self.world > 1:
            import torch.distributed as dist

            dist.barrier()


def communicator(device: Any) -> Communicator:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return Communicator(int(dist.get_rank()), int(dist.get_world_size()), device)
    return Communicator()
