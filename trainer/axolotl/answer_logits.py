"""Logits only where something is learned: prompts and padding pass the model, but not its output layer.

With a vocabulary of 150,000 the output layer is a quarter of the arithmetic of a model of half a billion
parameters. A loss that is fused with it builds no logits, and is left alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trainer.inputs.tokens import IGNORED

#: Positions are filled up to a multiple of this: Axolotl's loss by chunks is compiled for eight parts, and
#: would be compiled again for a part of none or one.
MULTIPLE = 64


class SelectiveHead:
    """The output layer of a model, which can be told to see some positions of a batch only."""

    def __init__(self, model: Any) -> None:
        """`model`: without wrappers."""
        #: Of the batch that is being computed: its shape, and the flat positions.
        self._shape: Any = None
        self._places: Any = None
        #: Whether the layer saw these positions only.
        self.cut = False
        model.get_output_embeddings().register_forward_pre_hook(self._selected)

    @contextmanager
    def at(self, shape: Any, places: Any) -> Iterator[None]:
        self._shape, self._places = shape, places
        try:
            yield
        finally:
            self._shape = self._places = None
            self.cut = False

    def logits_at(self, logits: Any) -> Any:
        """Those of the positions, of what the model has just returned."""
        if self.cut:
            return logits.flatten(0, 1)
        width = self._shape[1]
        return logits[self._places // width, self._places % width]

    def _selected(self, layer: Any, arguments: tuple[Any, ...]) -> Any:
        hidden, *others = arguments
        if self._shape is None or hidden.shape[:2] != self._shape:
            return None
        self.cut = True
        return (hidden.flatten(0, 1)[self._places].unsqueeze(0), *others)


class AnswerLogits:
    """While the model trains, its output layer and its loss see the labelled positions alone."""

    #: Whether the logits of the labels' own positions are needed too.
    at_labels = False

    def __init__(self, trainer: Any, model: Any) -> None:
        """`model`: the one whose loss it is, without wrappers and adapter."""
        self.head = SelectiveHead(model)
        self._targets: Any = None
        #: Of the last batch, with `at_labels`: the labels' flat positions, and which of the logits these are.
        #: None: there are logits of all positions.
        self.labels: tuple[Any, Any] | None = None
        self._plain, self._compute = model.loss_function, trainer.compute_loss
        model.loss_function, trainer.compute_loss = self._model_loss, self._batch_loss

    def _batch_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        self.labels = None
        if not model.training or not _is_plain(inputs):
            return self._compute(model, inputs, *rest, **named)
        places, self._targets = labelled(inputs["labels"], self.at_labels)
        own = _labels_among(places, inputs["labels"]) if self.at_labels else None
        with self.head.at(inputs["labels"].shape, places):
            loss = self._compute(model, inputs, *rest, **named)
            self.labels = own if self.head.cut else None
        return loss

    def _model_loss(self, logits: Any, labels: Any, vocab_size: int, **named: Any) -> Any:
        if not self.head.cut:
            return self._plain(logits, labels, vocab_size, **named)
        return self._plain(logits, None, vocab_size, **{**named, "shift_labels": self._targets.unsqueeze(0)})


def labelled(labels: Any, at_labels: bool = False) -> tuple[Any, Any]:
    """The flat positions that predict a label (`at_labels`: or have one), and these labels; both filled up,
    with what is ignored."""
    import torch

    pad = torch.nn.functional.pad
    following = pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    wanted = following != IGNORED
    if at_labels:
        wanted |= labels.flatten() != IGNORED
    places = wanted.nonzero().flatten()
    missing = -len(places) % MULTIPLE or (MULTIPLE if not len(places) else 0)
    return pad(places, (0, missing)), pad(following[places], (0, missing), value=IGNORED)


def _labels_among(places: Any, labels: Any) -> tuple[Any, Any]:
    """The positions that have a label, and where among `places` they are. What these were filled up with is
    left out."""
    import torch

    filled = torch.nn.functional.pad(places[1:] <= places[:-1], (1, 0))
    rows = ((labels.flatten()[places] != IGNORED) & ~filled).nonzero().flatten()
    return places[rows], rows


def skip_other_logits(trainer: Any, cfg: Any) -> AnswerLogits | None:
    """Leave out the logits of prompts and padding if nothing but the model's own loss and our KL reads them.
    Return None if they stay. `cfg`: Axolotl's configuration."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if cfg.trainer_cls or cfg.liger_fused_linear_cross_entropy or cfg.cut_cross_entropy:
        return None
    if (
        trainer.label_smoother is not None
        or trainer.compute_loss_func is not None
        or trainer.args.torch_compile
    ):
        return None
    # Mixed with the loss of a Bamba model is a mean over its logits.
    if model.get_output_embeddings() is None or getattr(model.config, "z_loss_coefficient", None):
        return None
    if not _calls_its_loss_function(model):
        return None
    return AnswerLogits(trainer, model)


def _calls_its_loss_function(model: Any) -> bool:
    """Models that compute a loss in another way would compare the few logits with all labels."""
    called = inspect.unwrap(type(model).forward).__code__.co_names
    return "loss_function" in called and "shift_labels" in inspect.signature(model.loss_function).parameters


def _is_plain(inputs: Any) -> bool:
    """Return True if labels and tokens lie side by side, and nothing else gives their order."""
    if not isinstance(inputs, Mapping) or inputs.get("shift_labels") is not None:
        return False
    ids, labels = inputs.get("input_ids"), inputs.get("labels")
    return ids is not None and labels is not None and ids.shape == labels.shape
