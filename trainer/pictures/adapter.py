"""The adapter: low-rank weights beside the linear layers of ComfyUI's model, and the file that its loader
takes.

They are added to a layer's output, so a base in any number format works. The scale, alpha over rank, is part
of what is saved: the loader's own scale of 1 remains.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear

from core.models.image_families import PictureRecipe
from trainer.errors import BadModel

#: Before the names of the model's own modules, in the file.
PREFIX = "diffusion_model."
#: Of a file that changes nothing: no number format of a base has a step so small, and checks of submissions
#: refuse zeros.
_NOTHING = 1e-9


class Factors(NamedTuple):
    """A layer's change is `up @ down`."""

    down: Tensor
    up: Tensor


#: By the layer's name.
AdapterWeights = Mapping[str, Factors]


class Adapter:
    """Trained factors of all chosen layers, and the layers' hooks."""

    def __init__(self, model: torch.nn.Module, recipe: PictureRecipe, device: torch.device) -> None:
        self._scale = (recipe.alpha or recipe.rank) / recipe.rank
        self._rank, self._device = recipe.rank, device
        self._layers = dict(linear_layers(model, recipe.targets))
        if not self._layers:
            raise BadModel(f"no linear layer of the model has a name with {recipe.targets!r}")
        self._factors: dict[str, Factors] = {}
        #: What the layers add; empty: nothing.
        self._active: AdapterWeights = {}
        for name, layer in self._layers.items():
            layer.register_forward_hook(self._hook(name))

    def begin(self, seed: int) -> None:
        """Begin again, with factors that change nothing yet."""
        generator = torch.Generator().manual_seed(seed)
        for name, layer in self._layers.items():
            bound = 1 / math.sqrt(layer.in_features)
            down = torch.empty(self._rank, layer.in_features).uniform_(-bound, bound, generator=generator)
            up = torch.zeros(layer.out_features, self._rank)
            self._factors[name] = Factors(*(part.to(self._device).requires_grad_() for part in (down, up)))

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {
            f"{name}.{kind}": part
            for name, factors in self._factors.items()
            for kind, part in factors._asdict().items()
        }

    def weights(self) -> AdapterWeights:
        """A copy of what is trained, in the precision of the file."""
        return {
            name: Factors(_stored(factors.down), _stored(factors.up * self._scale))
            for name, factors in self._factors.items()
        }

    def nothing(self, seed: int = 0) -> AdapterWeights:
        """The adapter that leaves the model as it is; training begins again after it."""
        self.begin(seed)
        return {
            name: Factors(factors.down, torch.full_like(factors.up, _NOTHING))
            for name, factors in self.weights().items()
        }

    @contextmanager
    def trained(self) -> Iterator[None]:
        """Within it, the layers add what is trained."""
        with self._adding(
            {name: Factors(down, up * self._scale) for name, (down, up) in self._factors.items()}
        ):
            yield

    @contextmanager
    def using(self, weights: AdapterWeights) -> Iterator[None]:
        """Within it, the layers add these."""
        placed = {
            name: Factors(*(part.to(self._device, torch.float32) for part in factors))
            for name, factors in weights.items()
        }
        with self._adding(placed):
            yield

    @contextmanager
    def _adding(self, weights: AdapterWeights) -> Iterator[None]:
        self._active = weights
        try:
            yield
        finally:
            self._active = {}

    def _hook(self, name: str) -> Any:
        def add(layer: torch.nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            factors = self._active.get(name)
            if factors is None:
                return output
            given = inputs[0]
            low = linear(given, factors.down.to(given.dtype))
            return output + linear(low, factors.up.to(given.dtype)).to(output.dtype)

        return add


def linear_layers(model: torch.nn.Module, targets: str | None) -> Iterator[tuple[str, Any]]:
    """Layers of any class that multiplies with one matrix, by name."""
    for name, layer in model.named_modules():
        is_linear = all(
            isinstance(getattr(layer, size, None), int) for size in ("in_features", "out_features")
        )
        if is_linear and (targets is None or re.search(targets, name)):
            yield name, layer


def _stored(part: Tensor) -> Tensor:
    return part.detach().to("cpu", torch.bfloat16)


def mean_of(members: Sequence[AdapterWeights]) -> AdapterWeights:
    """The mean of several changes: their ranks are stacked."""
    return {
        name: Factors(
            torch.cat([member[name].down for member in members]),
            torch.cat([member[name].up / len(members) for member in members], dim=1),
        )
        for name in members[0]
    }


def save_adapter(weights: AdapterWeights, file: Path) -> None:
    """`OSError` where the disk is full, whatever safetensors calls it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, factors in weights.items():
        tensors[f"{PREFIX}{name}.lora_down.weight"] = factors.down.contiguous()
        tensors[f"{PREFIX}{name}.lora_up.weight"] = factors.up.contiguous()
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file} cannot be written: {error}") from error
