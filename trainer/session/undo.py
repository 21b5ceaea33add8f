"""Take training steps back: weights, optimizer and random numbers as they were."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from trainer.session.snapshots import Snapshots


class StepUndo:
    """What steps change, as it was when this was made: before the optimizer's first step."""

    def __init__(self, states: Snapshots, optimizers: Iterable[Any]) -> None:
        """`states` has the weights; see `of`."""
        self._states, self._optimizers = states, list(optimizers)
        self.groups = [
            {key: value for key, value in group.items() if key != "params"}
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]
        self._random = _randomness()

    @classmethod
    def of(cls, states: Snapshots, optimizers: Iterable[Any]) -> StepUndo | None:
        """None where there is no room to put the weights aside. All ranks call it, and what follows."""
        return cls(states, optimizers) if states.keep() else None

    def end(self) -> None:
        self._states.drop()

    def restore(self) -> None:
        self._states.load()
        for optimizer in self._optimizers:
            _forget_steps(optimizer)
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for group, before in zip(groups, self.groups, strict=True):
            group.update(before)
        _set_randomness(self._random)


def _forget_steps(optimizer: Any) -> None:
    """As if it had never stepped. Paged states of bitsandbytes are never freed, so they are zeroed in place;
    other optimizers create their state again where it is missing."""
    import torch

    if not type(getattr(optimizer, "optimizer", optimizer)).__module__.startswith("bitsandbytes"):
        optimizer.state.clear()
        return
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and not name.startswith("qmap"):
                value.zero_()
            elif name == "step":
                state[name] = 0


def _randomness() -> tuple[Any, ...]:
    import numpy
    import torch

    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state(), cuda


def _set_randomness(state: tuple[Any, ...]) -> None:
    import numpy
    import torch

    own, arrays, tensors, cuda = state
    random.setstate(own)
    numpy.random.set_state(arrays)
    torch.set_rng_state(tensors)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
