"""Steps that leave no trace, in a Hugging Face trainer that is about to begin: the learning-rate search's
hands."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any


class HfProber:
    """Between `on_train_begin` and the first step: model and optimizer are wrapped, nothing has moved yet.

    The engine's own methods do the work (its `training_step` accumulates, shards and generates as later), but
    none of its counters is told.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loader: Any = None
        self._rows: Iterator[Any] = iter(())
        self._batches: list[tuple[list[Any], Any]] = []
        self._weights: list[tuple[Any, Any]] = []
        self._groups: list[dict[str, Any]] = []
        self._random: Any = None
        self._orders: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        self._random = _randomness()
        trained = [one for one in self._model.parameters() if one.requires_grad]
        # On the host: on a full GPU there is no room for a second copy.
        self._weights = [(one, _local(one).detach().to("cpu", copy=True)) for one in trained]
        groups = self._trainer.optimizer.param_groups
        self._groups = [{key: value for key, value in one.items() if key != "params"} for one in groups]
        # The training's own: another one would be packed anew, which takes as long as a search.
        self._loader = self._trainer.callback_handler.train_dataloader
        # Its order may come from a generator of its own, which goes on where the probes left it.
        self._orders = [(one, one.get_state()) for one in _generators(self._loader)]
        self._rows = iter(self._loader)

    @property
    def _model(self) -> Any:
        return self._trainer.model_wrapped

    def step(self, factor: float, place: int) -> float:
        trainer, model = self._trainer, self._model
        samples, count = self._batch(place)
        trainer.current_gradient_accumulation_steps = len(samples)
        for group, kept in zip(trainer.optimizer.param_groups, self._groups, strict=True):
            group["lr"] = kept["initial_lr"] * factor
        total = 0.0
        for at, inputs in enumerate(samples):
            last = at + 1 == len(samples)
            trainer.accelerator.gradient_state._set_sync_gradients(last)
            with nullcontext() if last else trainer.accelerator.no_sync(model):
                # Some trainers take out of the batch what they have used.
                given = dict(inputs) if isinstance(inputs, Mapping) else list(inputs)
                total += float(trainer.training_step(model, given, count))
        if trainer.args.max_grad_norm > 0:
            trainer._clip_grad_norm(model)
        trainer.optimizer.step()
        model.zero_grad()
        return total

    def _batch(self, place: int) -> tuple[list[Any], Any]:
        """The same every time; where the rows are used up, from the first one again."""
        trainer = self._trainer
        while place >= len(self._batches):
            wanted = trainer.args.gradient_accumulation_steps
            samples, count = trainer.get_batch_samples(self._rows, wanted, trainer.args.device)
            if len(samples) < wanted:
                break
            self._batches.append((samples, count))
        if not self._batches:
            raise ValueError("there are not rows enough for one step")
        return self._batches[place % len(self._batches)]

    def restore(self) -> None:
        import torch

        with torch.no_grad():
            for weight, kept in self._weights:
                _local(weight).copy_(kept)
        optimizer = self._trainer.optimizer
        _begin_anew(optimizer)
        for group, kept in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(kept)
        _set_randomness(self._random)
        self._forget()

    def _forget(self) -> None:
        """TRL's trainers gather metrics; for rewards they answer prompts once for several steps."""
        if hasattr(self._trainer, "_buffered_inputs"):
            self._trainer._step, self._trainer._buffered_inputs = 0, None
        for metrics in getattr(self._trainer, "_metrics", {}).values():
            metrics.clear()

    def end(self) -> None:
        self._model.zero_grad()
        for generator, state in self._orders:
            generator.set_state(state)
        # A prepared loader stays "the active one" until its last row has been asked for.
        if hasattr(self._loader, "end"):
            self._loader.end()
        self._loader, self._rows = None, iter(())
        self._batches, self._weights, self._groups, self._orders = [], [], [], []


def _begin_anew(optimizer: Any) -> None:
    """As if it had never stepped. Paged states of bitsandbytes are never given back: those are zeroed where
    they lie; what others keep is made anew where it is missing."""
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


def _generators(loader: Any, deep: int = 4) -> list[Any]:
    """Of a loader and of what samples for it, however it is wrapped."""
    import torch

    found = []
    for name in ("generator", "sampler", "batch_sampler", "base_dataloader"):
        part = getattr(loader, name, None)
        if isinstance(part, torch.Generator):
            found.append(part)
        elif part is not None and deep:
            found += _generators(part, deep - 1)
    return [one for place, one in enumerate(found) if all(one is not other for other in found[:place])]


def _local(weight: Any) -> Any:
    """This rank's part of a sharded weight."""
    return weight.to_local() if hasattr(weight, "to_local") else weight.data


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
