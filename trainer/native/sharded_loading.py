"""A base model read in shards: no process ever holds the whole.

1. `reading_in_shards`: transformers reads into parameters that are split already, so each process reads its
   own rows of every tensor from the files.
2. `put_stand_ins`: parameters of the whole shape without memory take the shards' place, for PEFT to see.
3. `detach_shards`, then FSDP2 wraps a model without weights, then `attach_shards`.

Parameters that transformers makes of others, with rows in another order, are read whole into host memory, and
FSDP2 splits them layer by layer.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

log = logging.getLogger(__name__)

#: The attribute of a stand-in with the shard that it stands for.
_SHARD = "shard_of_native_trainer"


@contextmanager
def reading_in_shards(mesh: DeviceMesh | None) -> Iterator[None]:
    """Split models that transformers loads over `mesh`, before their weights are read."""
    if mesh is None:
        yield
        return
    from transformers import PreTrainedModel

    def split(model: Any, *_: Any) -> Any:
        if getattr(model.config, "quantization_config", None) is None:
            _split_empty(model, mesh)
        return model

    # The method is inherited: this hides it for a while.
    PreTrainedModel.maybe_distribute_model = staticmethod(split)
    try:
        yield
    finally:
        del PreTrainedModel.maybe_distribute_model


def _split_empty(model: Any, mesh: DeviceMesh) -> None:
    whole = 0
    made = _made_of_others(model, mesh.size(mesh.ndim - 1))
    for name, module, own, weight in list(_places(model)):
        if made.search(name):
            whole += weight.numel()
            continue
        module._parameters[own] = _empty_shard(weight, mesh)
    if whole:
        text = "%s parameters are cut out of other tensors: every process reads them whole into host memory"
        log.warning(text, f"{whole:,}")


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield every parameter with its module and its name there; shared ones come several times."""
    for prefix, module in model.named_modules():
        for own, weight in module._parameters.items():
            if weight is not None:
                yield f"{prefix}.{own}", module, own, weight


def _empty_shard(weight: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    placements = placements_on(mesh)
    size, _ = compute_local_shape_and_global_offset(weight.shape, mesh, placements)
    local = torch.empty(size, dtype=weight.dtype, device="meta")
    return nn.Parameter(_as_shard(local, mesh, weight), requires_grad=weight.requires_grad)


def placements_on(mesh: DeviceMesh) -> list[Placement]:
    """Return FSDP2's placements: rows split over the last dimension, copies over the first of two."""
    return [*[Replicate()] * (mesh.ndim - 1), Shard(0)]


def _as_shard(local: Tensor, mesh: DeviceMesh, whole: Tensor) -> DTensor:
    return DTensor.from_local(
        local, mesh, placements_on(mesh), run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _made_of_others(model: Any, shards: int) -> re.Pattern[str]:
    """Match names of parameters whose rows are not the same rows of the tensors that they are made of.

    Stacked experts keep their rows; halves that are cut out of one tensor, for example, do not."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    stacks = [len(weight) for _, _, _, weight in _places(model) if weight.ndim == 3]
    experts_divide = all(experts % shards == 0 for experts in stacks)

    def keeps_rows(operation: Any) -> bool:
        if isinstance(operation, MergeModulelist):
            return operation.dim == 0 and experts_divide
        return isinstance(operation, Concatenate) and bool(operation.dim != 0)

    converters = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightConverter)]
    targets = [
        target.replace("*.", r".*\.").replace(r"\1", ".*")
        for converter in converters
        if not all(keeps_rows(operation) for operation in converter.operations)
        for target in converter.target_patterns
    ]
    return re.compile("|".join(targets) or "(?!)")


def put_stand_ins(model: nn.Module, device: torch.device) -> None:
    """Replace shards by tensors of the whole shape that repeat one number, from which PEFT takes shape,
    device and format."""
    seen: dict[int, nn.Parameter] = {}
    for _, module, own, weight in list(_places(model)):
        if not isinstance(weight.data, DTensor):
            continue
        if id(weight) not in seen:
            number = torch.empty(1, dtype=weight.dtype, device=device)
            seen[id(weight)] = nn.Parameter(number.expand(weight.shape), requires_grad=weight.requires_grad)
            setattr(seen[id(weight)], _SHARD, weight.data)
        module._parameters[own] = seen[id(weight)]


def shard_of(weight: Tensor) -> DTensor | None:
    """Return the shard that a stand-in stands for; None for any other parameter."""
    shard: DTensor | None = getattr(weight, _SHARD, None)
    return shard


class DetachedShard(NamedTuple):
    """A shard taken out of a model that FSDP2 is to wrap without weights, and all its places."""

    shard: DTensor
    places: list[tuple[nn.Module, str]]


def detach_shards(net: nn.Module) -> list[DetachedShard]:
    """Take the shards out of a model; what stays has no memory."""
    detached: dict[int, DetachedShard] = {}
    empty: dict[int, nn.Parameter] = {}
    for _, module, own, weight in list(_places(net)):
        if (shard := shard_of(weight)) is None:
            continue
        if id(weight) not in detached:
            detached[id(weight)] = DetachedShard(shard, [])
            meta = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            empty[id(weight)] = nn.Parameter(meta, requires_grad=weight.requires_grad)
        module._parameters[own] = empty[id(weight)]
        detached[id(weight)].places.append((module, own))
    return list(detached.values())


def attach_shards(detached: list[DetachedShard]) -> None:
    """Put shards in place of FSDP2's empty ones; it looks for them at the first pass."""
    while detached:
        shard, places = detached.pop()
        module, own = places[0]
        empty: Any = module._parameters[own]
        local = _as_shard(shard.to_local(), empty.device_mesh, empty)
        weight: Any = nn.Parameter(local, requires_grad=empty.requires_grad)
        for module, own in places:
            module._parameters[own] = weight
