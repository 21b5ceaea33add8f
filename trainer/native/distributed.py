"""Several GPUs: who this process is, how the model is distributed, and how all agree.

One process works the same way, so nothing else depends on how many there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from core.domain.choices import Parallelism
from core.planning.plan import TrainingPlan
from trainer.errors import BadData, TrainingError
from trainer.native.model import DpoLossModel, LossModel, without_adapters
from trainer.native.sharded_loading import attach_shards, detach_shards, shard_of
from trainer.session.ranks import Communicator

#: A rank that waits longer for the others would wait for ever: they are dead or stuck.
HANG_S = 600.0
#: The process group gives up this much later than the watchdog, which reports more.
_AFTER_WATCHDOG_S = 60.0


#: Groups, as long as this process lives. Were DistributedDataParallel the last to hold one, it would end it
#: with the interpreter's lock in hand, and wait for a thread of the group's that waits for that lock.
_kept_groups: list[Any] = []

CPU = torch.device("cpu")


class GpuNotVisible(TrainingError):
    """The plan counts on a GPU that cannot be seen."""

    code = "no_gpu"


@dataclass(frozen=True)
class NativeCommunicator(Communicator):
    device: torch.device = CPU
    #: Called whenever something was done; see `trainer.session.watchdog`.
    heartbeat: Callable[[], None] = lambda: None

    def require_same(self, what: str, *numbers: float) -> None:
        """`BadData` where a rank has other numbers than the first."""
        if self.world == 1:
            return
        own = [float(number) for number in numbers]
        differs = self.from_first(own) != own
        if self.any(differs):
            which = "this one's differ" if differs else "another one's differ"
            raise BadData(
                f"rank {self.rank} of {self.world}: the ranks have different {what}, {which} from the first "
                "one's; all must read the same files, on a file system that they share"
            )


@contextmanager
def join_process_group(
    *, cpu: bool, heartbeat: Callable[[], None] = lambda: None, hang_s: float = HANG_S
) -> Iterator[NativeCommunicator]:
    """The process group that `torchrun` or `accelerate launch` prepared, or this process alone."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu") if cpu else torch.device("cuda", local)
    if not cpu:
        if local >= torch.cuda.device_count():
            raise GpuNotVisible(
                f"process {local} of this machine sees {torch.cuda.device_count()} GPUs: look at the driver "
                "(nvidia-smi), at what the container may see, and at CUDA_VISIBLE_DEVICES"
            )
        torch.cuda.set_device(device)
    if world == 1:
        yield NativeCommunicator(0, 1, device, heartbeat)
        return
    dist.init_process_group("gloo" if cpu else "nccl", timeout=timedelta(seconds=hang_s + _AFTER_WATCHDOG_S))
    _kept_groups.append(dist.group.WORLD)
    yield NativeCommunicator(rank, world, device, heartbeat)
    # Not after an error: leaving a group waits for ranks that may be gone.
    dist.destroy_process_group()


def shard_mesh(plan: TrainingPlan, ranks: NativeCommunicator) -> DeviceMesh | None:
    """The mesh over which the model is split; None if every rank has the whole."""
    if ranks.world == 1 or plan.parallelism is not Parallelism.FSDP:
        return None
    assert plan.fsdp is not None
    # An operator's launcher may spread a plan for one machine over several.
    within = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world))
    if within < ranks.world and (plan.fsdp.within_nodes or plan.gpus.nodes == 1):
        hybrid = (ranks.world // within, within)
        return init_device_mesh(ranks.device.type, hybrid, mesh_dim_names=("copy", "shard"))
    return init_device_mesh(ranks.device.type, (ranks.world,), mesh_dim_names=("shard",))


def shard(net: LossModel, plan: TrainingPlan, mesh: DeviceMesh | None, device: torch.device) -> None:
    """Wrap the model with FSDP2: each layer is gathered for its computation, during that of the one before.
    Does nothing without a mesh. Must come first after loading: stand-ins cannot compute."""
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    if mesh is None:
        return
    assert plan.fsdp is not None
    broadcast_trainable(net, device)
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": plan.targets.fsdp_reshard_after_forward,
        # Gradients are summed in fp32 whatever they were computed in.
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
    }
    layers = layers_of(net)
    base = getattr(net, "base", None)
    detached = detach_shards(net)
    for layer in [*layers, *(layers_of(base) if base is not None else [])]:
        fully_shard(layer, **options)
    fully_shard(net, **options)
    attach_shards(detached)
    if isinstance(net, DpoLossModel):
        register_fsdp_forward_method(net, "preferred")
    if plan.targets.fsdp_forward_prefetch:
        for layer, following in pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])  # type: ignore[operator]


def distribute(net: nn.Module, plan: TrainingPlan, ranks: NativeCommunicator) -> nn.Module:
    """Return the net for all ranks: unchanged if `shard` has split it, or on one rank."""
    if ranks.world == 1 or plan.parallelism is Parallelism.FSDP:
        return net
    broadcast_trainable(net, ranks.device)
    ids = None if ranks.device.type == "cpu" else [ranks.device.index]
    return nn.parallel.DistributedDataParallel(
        net, device_ids=ids, gradient_as_bucket_view=True, static_graph=False, broadcast_buffers=False
    )


def broadcast_trainable(net: nn.Module, device: torch.device) -> None:
    """Copy the first rank's adapters to all, since they are drawn at random. Shards come from the files."""
    with torch.no_grad():
        for weight in net.parameters():
            if weight.requires_grad and shard_of(weight) is None:
                first = weight.data.to(device)  # FSDP2 moves whole parameters later
                dist.broadcast(first, 0)
                weight.data.copy_(first)


def layers_of(net: nn.Module) -> list[nn.Module]:
    """The decoder's layers: the longest list of modules there is."""
    model: Any = net.model if hasattr(net, "model") else net
    lists = [
        list(module) for module in without_adapters(model).modules() if isinstance(module, nn.ModuleList)
    ]
    return max(lists, key=len, default=[])


def no_sync(net: nn.Module, last: bool) -> Any:
    """Gradients travel once per step, with its last micro-batch."""
    if isinstance(net, nn.parallel.DistributedDataParallel):
        return nullcontext() if last else net.no_sync()
    if hasattr(net, "set_requires_gradient_sync"):
        net.set_requires_gradient_sync(last)  # type: ignore[operator]
    return nullcontext()


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; every rank must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
