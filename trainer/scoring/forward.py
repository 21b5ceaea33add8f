"""One pass of a model over a batch, and what scores need of it: logits where something is predicted.

Rows are padded on the right and masked, so a row's numbers do not depend on its neighbours. Models that can
leave out logits (`logits_to_keep`) are asked only for the positions that some row of the batch needs.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from trainer.inputs.rows import IGNORED

Found = TypeVar("Found")

#: Bytes of one piece of logits in single precision.
PIECE = 512 << 20


@dataclass(frozen=True)
class Predicted:
    """For every labelled token of a batch, in order: logits, the token, and the row it is in."""

    logits: torch.Tensor
    targets: torch.Tensor
    rows: torch.Tensor


def unwrapped(model: Any) -> Any:
    """Without DDP's wrapper, which would wait for the other ranks."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def vocabulary(model: Any) -> int:
    return int(model.get_output_embeddings().weight.shape[0])


@contextlib.contextmanager
def scoring(model: Any) -> Iterator[None]:
    """Evaluation mode without gradients, in bf16 on a GPU as validators evaluate; left as it was found."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device.type
    cast = torch.autocast(device, torch.bfloat16) if device == "cuda" else contextlib.nullcontext()
    try:
        with torch.no_grad(), cast:
            yield
    finally:
        model.train(was_training)


@contextlib.contextmanager
def without_adapter(model: Any) -> Iterator[Any]:
    """The base that an adapter is on. `ValueError` when there is none to switch off."""
    switch = getattr(model, "disable_adapter", None)
    if switch is None:
        raise ValueError("the model has no adapter to switch off: give the base model as reference")
    with switch():
        yield model


def in_halves(
    model: Any, places: list[int], compute: Callable[[list[int]], Found]
) -> Iterator[tuple[list[int], Found]]:
    """Of the places together; in halves where the GPU's memory does not hold them together."""
    try:
        found = compute(places)
    except torch.OutOfMemoryError:
        # The ranks of a sharded model wait for each other in every pass: one may not make more of them.
        if len(places) < 2 or _is_sharded(model):
            raise
    else:
        yield places, found
        return
    torch.cuda.empty_cache()
    half = len(places) // 2
    yield from in_halves(model, places[:half], compute)
    yield from in_halves(model, places[half:], compute)


def _is_sharded(model: Any) -> bool:
    return any(type(weight).__name__ == "DTensor" for weight in model.parameters())


def predicted(
    model: Any, ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], pad: int
) -> Predicted:
    """Where a label is predicted: at the position before it."""
    marked = _padded(labels, IGNORED)
    (found,) = _passed(model, ids, pad, [(marked[:, 1:].ne(IGNORED), marked[:, 1:])])
    return found


def predicted_and_labelled(
    model: Any, ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], pad: int
) -> tuple[Predicted, Predicted]:
    """The same, and the positions of the labels themselves, of one pass."""
    marked = _padded(labels, IGNORED)
    before, itself = marked[:, 1:].ne(IGNORED), marked.ne(IGNORED)
    one, other = _passed(model, ids, pad, [(before, marked[:, 1:]), (itself, marked)])
    return one, other


def labelled(
    model: Any, ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], pad: int
) -> Predicted:
    """The positions of the labels themselves, where evaluation looks for the KL; `targets` are the labels."""
    marked = _padded(labels, IGNORED)
    (found,) = _passed(model, ids, pad, [(marked.ne(IGNORED), marked)])
    return found


def _passed(
    model: Any, ids: Sequence[Sequence[int]], pad: int, asked: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> list[Predicted]:
    """One pass. Each question is which positions, and what their targets are."""
    device = next(model.parameters()).device
    tokens = _padded(ids, pad).to(device)
    mask = _padded([[1] * len(one) for one in ids], 0).to(device)
    needed = torch.zeros(tokens.shape[1], dtype=torch.bool)
    for where, _ in asked:
        needed[: where.shape[1]] |= where.any(dim=0)
    places = needed.nonzero().flatten()
    options: dict[str, Any] = {"use_cache": False}
    keeps = _keeps_logits(model) and len(places) > 0
    if keeps:
        options["logits_to_keep"] = places.to(device)
    logits = model(input_ids=tokens, attention_mask=mask, **options).logits
    at = needed.cumsum(0) - 1 if keeps else torch.arange(len(needed))
    found = []
    for where, targets in asked:
        rows, columns = where.nonzero(as_tuple=True)
        chosen = logits[rows.to(device), at[columns].to(device)]
        found.append(Predicted(chosen, targets[rows, columns].to(device), rows.to(device)))
    return found


def _padded(values: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
    longest = max(len(one) for one in values)
    found = torch.full((len(values), longest), fill, dtype=torch.long)
    for row, one in enumerate(values):
        found[row, : len(one)] = torch.as_tensor(list(one), dtype=torch.long)
    return found


def _keeps_logits(model: Any) -> bool:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "logits_to_keep" in inspect.signature(inner.forward).parameters


def log_probs(found: Predicted) -> torch.Tensor:
    """Of each labelled token, in single precision and in pieces: the whole of it would double the memory."""
    parts = [_piece(found, part) for part in _pieces(found)]
    return torch.cat(parts) if parts else found.targets.float()


def _piece(found: Predicted, part: slice) -> torch.Tensor:
    logits = found.logits[part].float()
    taken = logits.gather(1, found.targets[part, None]).squeeze(1)
    return taken - logits.logsumexp(dim=1)


def _pieces(found: Predicted) -> Iterator[slice]:
    rows = max(PIECE // (4 * max(found.logits.shape[-1], 1)), 1)
    for start in range(0, len(found.targets), rows):
        yield slice(start, start + rows)


def divergence(one: Predicted, other: Predicted) -> torch.Tensor:
    """KL(one || other) at each labelled token, summed over the vocabulary."""
    parts = []
    for part in _pieces(one):
        log_one = one.logits[part].float().log_softmax(dim=1)
        log_other = other.logits[part].float().log_softmax(dim=1)
        parts.append((log_one.exp() * (log_one - log_other)).sum(dim=1))
    return torch.cat(parts) if parts else one.targets.float()


def by_row(values: torch.Tensor, found: Predicted, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum and number of the values of each row of the batch, in double precision on the CPU."""
    sums = torch.zeros(count, dtype=torch.float64)
    rows = found.rows.cpu()
    sums.index_add_(0, rows, values.double().cpu())
    return sums, torch.bincount(rows, minlength=count)
