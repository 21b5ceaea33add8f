"""`model.generate` of a training by rewards: failures in it are told as its own, sharded weights gathered.

Sharded (FSDP2) and left alone, every token gathers every layer anew, and the ranks go on together until the
last of them is done. Where a GPU has room for all weights while nothing is kept for a backward pass, they are
gathered once, and each rank generates for itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

#: On a model whose `generate` is ours already.
MARK = "_god_miner_generates"


def generate_well(
    model: Any, whole: bool, reshard: bool, moment: Callable[[], AbstractContextManager[None]]
) -> None:
    """From now on, whoever asks: the engine or our evaluation. `whole`: a GPU has room for all weights;
    `reshard`: what the plan says of forward passes, and holds again after each generation."""
    inner = getattr(model, "_orig_mod", model)
    if getattr(inner, MARK, False):
        return
    if inner is not model:
        # Compiled, it is no part of FSDP's to whoever registers generating with it: the engine does in vain.
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(inner, "generate")
    plain = inner.generate
    parts = sharded_parts(inner) if whole else []

    @functools.wraps(plain)
    def generate(*arguments: Any, **named: Any) -> Any:
        with moment():
            if not parts:
                return plain(*arguments, **named)
            with gathered(parts, reshard):
                return plain(*arguments, **{**named, "synced_gpus": False})

    inner.generate = generate
    setattr(inner, MARK, True)


@contextmanager
def gathered(parts: list[Any], reshard: bool) -> Iterator[None]:
    """All weights on every GPU. The ranks come in together, and need not leave together."""
    try:
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(reshard, recurse=False)
            part.reshard()


def sharded_parts(model: Any) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [part for part in model.modules() if isinstance(part, FSDPModule)]
