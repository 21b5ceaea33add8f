"""An exponential moving average of the trained weights, in their own format beside them.

In bf16 a step's part of a slow average is smaller than the format's last digit and would be rounded away
every time; rounding at random keeps it in the mean.

Of weights that are split over GPUs each rank averages its own part, so nothing is gathered for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class MovingAverage:
    def __init__(
        self,
        parameters: dict[str, Any],
        decay: float,
        every: int = 1,
        drop_gathered: Callable[[], None] = lambda: None,
    ) -> None:
        """`parameters`: those that are trained, by name; the average begins at their values. Split weights
        are to be split already. `drop_gathered`: called around a swap, as what was gathered is of before."""
        self.decay, self.every = decay, every
        self.updates = 0
        self._weights = parameters
        self._drop_gathered = drop_gathered
        self._mean = {name: own_part(weight).clone() for name, weight in parameters.items()}

    def stepped(self, step: int) -> None:
        if step % self.every:
            return
        self.updates += 1
        # A young average forgets faster: else a short training would be scored by the weights it began with.
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for name, weight in self._weights.items():
            mean = self._mean[name]
            updated = mean.float().lerp_(own_part(weight).float(), 1 - decay)
            mean.copy_(rounded(updated, mean.dtype))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Swap the averaged weights in, and back afterwards. No third copy is made."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        self._drop_gathered()
        for name, weight in self._weights.items():
            mean, own = self._mean[name], own_part(weight)
            kept = own.clone()
            own.copy_(mean)
            mean.copy_(kept)

    def state(self) -> dict[str, Any]:
        return {name: mean.cpu() for name, mean in self._mean.items()}

    def restore(self, state: dict[str, Any], updates: int) -> None:
        for name, mean in state.items():
            self._mean[name].copy_(mean)
        self.updates = updates


def own_part(weight: Any) -> Any:
    """Return this rank's part of a tensor, sharing its memory: all of it unless it is split. The numeric
    format stays."""
    if getattr(weight, "requires_grad", False):
        weight = weight.detach()
    return weight.to_local() if hasattr(weight, "to_local") else weight


def drop_gathered(model: Any) -> None:
    """Free the weights that FSDP2 keeps gathered after a forward pass: the next one gathers them again."""
    from torch.distributed.fsdp import FSDPModule

    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def rounded(values: Any, dtype: Any, random: Any = None) -> Any:
    """fp32 to bf16, up or down at random in proportion; leave other formats as they are. `random` is a
    generator, by default the device's own."""
    import torch

    if dtype is not torch.bfloat16:
        return values.to(dtype)
    bits = values.view(torch.int32)
    noise = torch.randint(1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=random)
    # Below the format's 16 bits: the carry rounds up as often as the rest is large.
    near = noise.add_(bits).bitwise_and_(-65536).view(torch.float32).to(torch.bfloat16)
    # The carry would turn CUDA's NaN, all of whose bits are set, into a zero.
    return near.masked_fill_(values.isnan(), torch.nan)
