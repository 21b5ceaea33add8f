"""`model.generate` of a training by rewards: failures in it are told as its own, sharded weights gathered.

Sharded (FSDP2) and left alone, every token gathers every layer anew, and the ranks go on together until the
last of them is done. While nothing is kept for a backward pass, a GPU has room for more of the weights: as
many layers as the plan says are gathered once. Where that is all of them, each rank generates for itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from trainer.axolotl_patches import LANGUAGE
from trainer.scoring.forward import scoring

#: On a model whose `generate` is ours already.
MARK = "_god_miner_generates"


def generate_well(
    model: Any, whole: float, reshard: bool, moment: Callable[[], AbstractContextManager[None]]
) -> None:
    """From now on, whoever asks: the engine or our evaluation. `whole`: the part of the layers that a GPU has
    room for; `reshard`: what the plan says of forward passes, and holds again after each generation."""
    inner = getattr(model, "_orig_mod", model)
    if getattr(inner, MARK, False):
        return
    if inner is not model:
        # Compiled, it is no part of FSDP's to whoever registers generating with it: the engine does in vain.
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(inner, "generate")
    plain = inner.generate
    parts = kept_parts(inner, whole)
    # With every weight there, no rank waits for another one's tokens.
    alone = {"synced_gpus": False} if whole >= 1 else {}

    @functools.wraps(plain)
    def generate(*arguments: Any, **named: Any) -> Any:
        with moment():
            if not parts:
                return plain(*arguments, **named)
            with gathered(parts, reshard):
                return plain(*arguments, **{**named, **alone})

    inner.generate = generate
    setattr(inner, MARK, True)


def kept_parts(model: Any, whole: float) -> list[Any]:
    """All of them, or the root, which every pass needs from its first to its last layer, and so many layers
    of those that read text, each with all that is a part of its own inside it."""
    if not whole or whole >= 1:
        return sharded_parts(model) if whole else []
    from torch.distributed.fsdp import FSDPModule

    parts = {name: part for name, part in model.named_modules() if isinstance(part, FSDPModule)}
    layers: list[str] = []
    for name in parts:
        if name and not (layers and name.startswith(f"{layers[-1]}.")):
            layers.append(name)
    layers = [name for name in layers if LANGUAGE in name.split(".")] or layers
    # A norm after the last layer may be a part too: no layer more for that.
    kept = layers[: int(whole * len(layers) + 1e-6)]
    inside = tuple(f"{name}." for name in kept)
    return [part for name, part in parts.items() if not name or name in kept or name.startswith(inside)]


@contextmanager
def gathered(parts: list[Any], reshard: bool) -> Iterator[None]:
    """What the first pass gathers of these stays until the end."""
    try:
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(reshard, recurse=False)
            part.reshard()


def wake(model: Any) -> None:
    """FSDP2 sees at the first pass which weights are trained, and reduces their gradients accordingly ever
    after. Ours may have the adapter switched off, to score the base: in bf16 the first backward pass then
    ends in gradients of the wrong kind. So the first pass is one of the model as it is trained."""
    import torch

    if sharded_parts(model):
        with scoring(model):
            model(input_ids=torch.zeros((1, 2), dtype=torch.long, device=next(model.parameters()).device))


def sharded_parts(model: Any) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [part for part in model.modules() if isinstance(part, FSDPModule)]
