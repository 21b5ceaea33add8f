"""Take training steps back: weights, optimizer and random numbers as they were."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from core.system.resources import free_memory, is_in_memory
from trainer.session.ema import own_part
from trainer.session.ranks import Communicator

#: Left free beside the copy: these bytes, and this multiple of the trained weights' own. A submission needs
#: memory and disk too.
MARGIN_BYTES, MARGIN_STATES = 2_000_000_000, 3


class Snapshots:
    """The trained weights, put aside in host memory, or in a file where that is short.

    Each rank keeps its own part: its shards of split weights, and some of those that all ranks have. So the
    weights are held once, and nothing is gathered."""

    def __init__(
        self,
        parameters: Mapping[str, Any],
        folder: Path,
        ranks: Communicator,
        per_machine: int = 1,
        drop_gathered: Callable[[], None] = lambda: None,
    ) -> None:
        """`parameters`: the trained ones, by name, split already. `folder` is for files; `per_machine` ranks
        share its memory. `drop_gathered` is called around a change, since gathered weights are older."""
        self._weights, self._folder, self._ranks = dict(parameters), folder, ranks
        self._drop_gathered = drop_gathered
        self._owners = _owners(self._weights, ranks.world)
        self._own = [name for name, owner in self._owners.items() if owner in (None, ranks.rank)]
        size = sum(_bytes(own_part(self._weights[name])) for name in self._own)
        self._size = per_machine * size
        self._margin = max(MARGIN_BYTES, MARGIN_STATES * sum(map(_bytes, self._weights.values())))
        self._state: dict[str, Any] | None = None
        self._file = folder / f"rank{ranks.rank}.safetensors"
        self._file.unlink(missing_ok=True)  # an earlier process's

    def keep(self) -> bool:
        """Put the weights aside as they are now; False where a rank has no room, and nothing is kept."""
        needed = self._size + self._margin
        parts = {name: own_part(self._weights[name]) for name in self._own}
        kept = False
        if free_memory() >= needed:
            kept = self._copy(parts)
        elif self._disk_free() >= needed:
            kept = self._write(parts)
        if self._ranks.any(not kept):
            self.drop()
            return False
        return True

    def drop(self) -> None:
        self._state = None
        self._file.unlink(missing_ok=True)

    def load(self) -> None:
        """Give the weights back what was put aside."""
        import torch

        self._drop_gathered()
        read = self._reader()
        with torch.no_grad():
            for name, owner in self._owners.items():
                own = own_part(self._weights[name])
                if owner in (None, self._ranks.rank):
                    own.copy_(read(name))
                if owner is not None and self._ranks.world > 1:
                    torch.distributed.broadcast(own, src=owner)
        self._drop_gathered()

    def _reader(self) -> Callable[[str], Any]:
        if self._state is not None:
            return self._state.__getitem__
        from safetensors import safe_open

        get: Callable[[str], Any] = safe_open(str(self._file), framework="pt").get_tensor
        return get

    def _disk_free(self) -> int:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return 0 if is_in_memory(self._folder) else shutil.disk_usage(self._folder).free
        except OSError:
            return 0

    def _copy(self, parts: Mapping[str, Any]) -> bool:
        """Memory that others took meanwhile costs the state, and not the training."""
        try:
            self._state = {name: part.to("cpu", copy=True) for name, part in parts.items()}
        except (MemoryError, RuntimeError):
            return False
        return True

    def _write(self, parts: Mapping[str, Any]) -> bool:
        """A disk that is full after all costs the state, and not the training."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            save_file({name: part.contiguous() for name, part in parts.items()}, self._file)
        except (OSError, SafetensorError):
            return False
        return True


def _owners(weights: Mapping[str, Any], world: int) -> dict[str, int | None]:
    """Map each weight that all ranks have to the rank that keeps it, and each split weight to None."""
    owners: dict[str, int | None] = {}
    loads = [0] * world
    for name in sorted(weights, key=lambda name: -int(weights[name].numel())):
        if hasattr(weights[name], "to_local"):
            owners[name] = None
        else:
            owners[name] = loads.index(min(loads))
            loads[owners[name] or 0] += _bytes(weights[name])
    return owners


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


class StepUndo:
    """The state that steps change, as it was before the optimizer's first step."""

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
        """Put the weights aside; return None if there is no room for them. All ranks call it, and the methods
        that follow."""
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
    """Reset an optimizer that has stepped. Paged states of bitsandbytes are never freed, so they are zeroed
    in place; other optimizers create their state again where it is missing."""
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
