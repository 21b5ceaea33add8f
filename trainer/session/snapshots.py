"""States of the trained weights, put aside while it trains: in host memory, or in files where that is short.

Each rank keeps its own part: of weights that are split over GPUs what it has of them, and some of those that
all ranks have. So a state is held once, and nothing is gathered.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from core.system.memory import free_memory, is_in_memory
from trainer.session.ema import own_part
from trainer.session.ranks import Communicator

#: Left free beside a new state: so many bytes, and as much as so many times the trained weights. A submission
#: needs memory and disk too.
MARGIN_BYTES, MARGIN_STATES = 2_000_000_000, 3
#: Numbers of a weight that are averaged at a time: in fp32 they take 64 MB.
_AT_ONCE = 1 << 24


class Snapshots:
    def __init__(
        self,
        parameters: Mapping[str, Any],
        folder: Path,
        ranks: Communicator,
        per_machine: int = 1,
        drop_gathered: Callable[[], None] = lambda: None,
    ) -> None:
        """`parameters`: those that are trained, by name, split already. `folder` is for files; so many ranks
        `per_machine` share its memory. `drop_gathered` is called around a change: what was gathered is of
        before."""
        self._weights, self._folder, self._ranks = dict(parameters), folder, ranks
        self._drop_gathered = drop_gathered
        self._owners = _owners(self._weights, ranks.world)
        self._own = [name for name, owner in self._owners.items() if owner in (None, ranks.rank)]
        size = sum(_bytes(own_part(self._weights[name])) for name in self._own)
        self._size = per_machine * size
        self._margin = max(MARGIN_BYTES, MARGIN_STATES * sum(map(_bytes, self._weights.values())))
        self._states: dict[int, dict[str, Any] | Path] = {}
        for left in folder.glob(f"*-rank{ranks.rank}.safetensors"):  # by an earlier process
            left.unlink(missing_ok=True)

    def keep(self, number: int) -> bool:
        """Put the weights aside as they are now; False where a rank has no room, and nothing is kept."""
        needed = self._size + self._margin
        parts = {name: own_part(self._weights[name]) for name in self._own}
        kept = False
        if free_memory() >= needed:
            kept = self._copy(number, parts)
        elif self._disk_free() >= needed:
            kept = self._write(number, parts)
        if self._ranks.any(not kept):
            self.drop(number)
            return False
        return True

    def drop(self, number: int) -> None:
        state = self._states.pop(number, None)
        if isinstance(state, Path):
            state.unlink(missing_ok=True)

    def clear(self) -> None:
        for number in list(self._states):
            self.drop(number)
        with suppress(OSError):  # another rank's files are still in it
            self._folder.rmdir()

    def load(self, numbers: Sequence[int]) -> None:
        """Give the weights the mean of these states."""
        import torch

        self._drop_gathered()
        states = [self._reader(number) for number in numbers]
        with torch.no_grad():
            for name, owner in self._owners.items():
                own = own_part(self._weights[name])
                if owner in (None, self._ranks.rank):
                    _set_mean(own, [read(name) for read in states])
                if owner is not None and self._ranks.world > 1:
                    torch.distributed.broadcast(own, src=owner)
        self._drop_gathered()

    def _reader(self, number: int) -> Callable[[str], Any]:
        state = self._states[number]
        if isinstance(state, dict):
            return state.__getitem__
        from safetensors import safe_open

        get: Callable[[str], Any] = safe_open(str(state), framework="pt").get_tensor
        return get

    def _disk_free(self) -> int:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return 0 if is_in_memory(self._folder) else shutil.disk_usage(self._folder).free
        except OSError:
            return 0

    def _copy(self, number: int, parts: Mapping[str, Any]) -> bool:
        """Memory that others took meanwhile costs the state, and not the training."""
        try:
            self._states[number] = {name: part.to("cpu", copy=True) for name, part in parts.items()}
        except (MemoryError, RuntimeError):
            return False
        return True

    def _write(self, number: int, parts: Mapping[str, Any]) -> bool:
        """A disk that is full after all costs the state, and not the training."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = self._folder / f"{number}-rank{self._ranks.rank}.safetensors"
        self._states[number] = path
        try:
            save_file({name: part.contiguous() for name, part in parts.items()}, path)
        except (OSError, SafetensorError):
            return False
        return True


def _owners(weights: Mapping[str, Any], world: int) -> dict[str, int | None]:
    """By name: the rank that keeps a weight which all have; None where each has a part of it."""
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


def _set_mean(weight: Any, values: Sequence[Any]) -> None:
    """In fp32: summed in bf16, the small differences between states would be rounded away."""
    import torch

    if len(values) == 1:
        weight.copy_(values[0])
        return
    if not weight.ndim:
        weight, values = weight.view(1), [value.view(1) for value in values]
    rows = max(_AT_ONCE // max(weight[:1].numel(), 1), 1)
    for start in range(0, len(weight), rows):
        part = weight[start : start + rows]
        total = torch.zeros_like(part, dtype=torch.float32)
        for value in values:
            total += value[start : start + rows].to(total.device)
        part.copy_(total / len(values))
