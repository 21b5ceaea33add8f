"""Several processes, one decision: what rank 0 says holds for all, and what one rank saw all hear of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Ranks(Protocol):
    """Every method is called by all ranks at the same point, or by none."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def from_first(self, values: Sequence[float]) -> list[float]:
        """Rank 0's numbers, on every rank."""

    def any(self, flag: bool) -> bool: ...

    def gather(self, values: Sequence[float]) -> list[float]:
        """The numbers of all ranks in order of rank; every rank brings as many as it likes."""

    def wait(self) -> None: ...


class OneRank:
    """A single process agrees with itself."""

    rank, world = 0, 1

    def from_first(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def any(self, flag: bool) -> bool:
        return flag

    def gather(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def wait(self) -> None:
        return None


class TorchRanks:
    """Over the process group that the engine has set up."""

    def __init__(self, device: Any) -> None:
        import torch.distributed as dist

        self._device = device
        self.rank, self.world = int(dist.get_rank()), int(dist.get_world_size())

    def from_first(self, values: Sequence[float]) -> list[float]:
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(list(values), dtype=torch.float64, device=self._device)
        dist.broadcast(tensor, src=0)
        return [float(value) for value in tensor.tolist()]

    def any(self, flag: bool) -> bool:
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([float(flag)], device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return bool(tensor.item())

    def gather(self, values: Sequence[float]) -> list[float]:
        import torch.distributed as dist

        found: list[list[float]] = [[] for _ in range(self.world)]
        dist.all_gather_object(found, list(values))
        return [value for part in found for value in part]

    def wait(self) -> None:
        import torch.distributed as dist

        dist.barrier()


def ranks_here(device: Any) -> Ranks:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return TorchRanks(device)
    return OneRank()
