"""Several GPUs: who I am, how the model is spread, and how everybody agrees.

Works the same with one process, so nothing else asks how many there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.choices import Parallelism
from core.plan import TrainingPlan
from trainer.errors import BadData, TrainingError
from trainer.native.net import plain

#: A rank that waits longer for the others will wait for ever: they are dead or somewhere else.
HANG_S = 600.0
#: The process group gives up this much later than the watch, which has more to say.
_AFTER_WATCH_S = 60.0


#: Groups, as long as this process lives. Were DistributedDataParallel the last to hold one, it would end it
#: with the interpreter's lock in hand, and wait for a thread of the group's that waits for that lock.
_left: list[Any] = []


class NoGpu(TrainingError):
    """The plan counts on a card that is not to be seen."""

    code = "no_gpu"


@dataclass(frozen=True)
class Ranks:
    """What `callbacks.ranks` asks for, and sums."""

    rank: int
    world: int
    device: torch.device
    #: Told whenever something was done; see `trainer.native.watch`.
    alive: Callable[[], None] = lambda: None

    def total(self, *numbers: float) -> list[float]:
        """Each number summed over all ranks."""
        if self.world == 1:
            return list(numbers)
        summed = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(summed)
        return [float(number) for number in summed.tolist()]

    def same(self, what: str, *numbers: float) -> None:
        """`BadData` where a rank has other numbers than the first."""
        if self.world == 1:
            return
        found = [float(number) for number in numbers]
        others = [self.from_first(found), found]
        if self.any(others[0] != others[1]):
            seen = "this one's differ" if others[0] != others[1] else "another one's differ"
            raise BadData(
                f"rank {self.rank} of {self.world}: the ranks have different {what}, {seen} from the first "
                "one's; all must read the same files, on a file system that they share"
            )

    def from_first(self, values: Sequence[float]) -> list[float]:
        if self.world == 1:
            return list(values)
        said = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.broadcast(said, 0)
        return [float(value) for value in said.tolist()]

    def any(self, flag: bool) -> bool:
        return self.total(float(flag))[0] > 0

    def gather(self, values: Sequence[float]) -> list[float]:
        if self.world == 1:
            return list(values)
        found: list[list[float]] = [[] for _ in range(self.world)]
        dist.all_gather_object(found, list(values))
        return [value for part in found for value in part]

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()


@contextmanager
def joined(*, cpu: bool, alive: Callable[[], None] = lambda: None, hang_s: float = HANG_S) -> Iterator[Ranks]:
    """The process group that `torchrun` or `accelerate launch` prepared, or this process alone."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu") if cpu else torch.device("cuda", local)
    if not cpu:
        if local >= torch.cuda.device_count():
            raise NoGpu(
                f"process {local} of this machine sees {torch.cuda.device_count()} GPUs: look at the driver "
                "(nvidia-smi), at what the container may see, and at CUDA_VISIBLE_DEVICES"
            )
        torch.cuda.set_device(device)
    if world == 1:
        yield Ranks(0, 1, device, alive)
        return
    # The last collectives of every rank are kept, so that a hang tells which of them was not joined.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    dist.init_process_group("gloo" if cpu else "nccl", timeout=timedelta(seconds=hang_s + _AFTER_WATCH_S))
    _left.append(dist.group.WORLD)
    yield Ranks(rank, world, device, alive)
    # Not after an error: leaving a group waits for ranks that may be gone.
    dist.destroy_process_group()


def spread(net: nn.Module, plan: TrainingPlan, ranks: Ranks) -> nn.Module:
    """The net over the ranks, as the plan says: whole on each, or in shards."""
    if ranks.world == 1:
        return net
    if plan.parallelism is Parallelism.FSDP:
        return _sharded(net, plan, ranks)
    same_start(net)
    ids = None if ranks.device.type == "cpu" else [ranks.device.index]
    return nn.parallel.DistributedDataParallel(
        net, device_ids=ids, gradient_as_bucket_view=True, static_graph=False, broadcast_buffers=False
    )


def same_start(net: nn.Module) -> None:
    """Adapters are drawn at random, so every rank takes over the first one's."""
    with torch.no_grad():
        for weight in net.parameters():
            if weight.requires_grad:
                dist.broadcast(weight.data, 0)


def _sharded(net: nn.Module, plan: TrainingPlan, ranks: Ranks) -> nn.Module:
    """FSDP2: each layer is gathered when it is computed, the next one while it is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    assert plan.fsdp is not None
    same_start(net)
    mesh = init_device_mesh(ranks.device.type, _mesh_shape(ranks), mesh_dim_names=_mesh_names(ranks))
    how: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": plan.fsdp.reshard_after_forward,
        # Gradients are summed in fp32 whatever they were computed in.
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
    }
    if plan.fsdp.offload_params:
        how["offload_policy"] = CPUOffloadPolicy()
    layers = layers_of(net)
    base = getattr(net, "base", None)
    for layer in [*layers, *(layers_of(base) if base is not None else [])]:
        fully_shard(layer, **how)
    fully_shard(net, **how)
    if plan.fsdp.forward_prefetch:
        for layer, following in pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
    return net


def _mesh_shape(ranks: Ranks) -> tuple[int, ...]:
    """Hybrid over several machines: shards within one, copies between them."""
    within = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world))
    return (ranks.world,) if within == ranks.world else (ranks.world // within, within)


def _mesh_names(ranks: Ranks) -> tuple[str, ...]:
    return ("shard",) if len(_mesh_shape(ranks)) == 1 else ("copy", "shard")


def layers_of(net: nn.Module) -> list[nn.Module]:
    """The decoder's layers: the longest list of modules there is."""
    model: Any = net.model if hasattr(net, "model") else net
    lists = [list(module) for module in plain(model).modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def no_sync(net: nn.Module, last: bool) -> Any:
    """Gradients travel once per step, with its last micro-batch."""
    if isinstance(net, nn.parallel.DistributedDataParallel):
        return nullcontext() if last else net.no_sync()
    if hasattr(net, "set_requires_gradient_sync"):
        net.set_requires_gradient_sync(last)  # type: ignore[operator]
    return nullcontext()


def inner(net: nn.Module) -> nn.Module:
    return net.module if isinstance(net, nn.parallel.DistributedDataParallel) else net


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may lie in shards, whole; every rank must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
