"""One forward pass over a batch of rows of like length, and what scores need of it.

Logits exist only where something is predicted; the numbers equal those of a pass row by row.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from trainer.inputs.tokens import IGNORED

Found = TypeVar("Found")

#: On a model: the context of its generations, and whether all of its weights are there meanwhile.
PREPARED, WHOLE = "_god_miner_prepared", "_god_miner_whole"
#: Bytes of one piece of logits in single precision.
PIECE = 512 << 20


@dataclass(frozen=True)
class Predicted:
    """Every labelled token of a batch, in order: its logits, itself and its row."""

    logits: torch.Tensor
    targets: torch.Tensor
    rows: torch.Tensor


def unwrapped(model: Any) -> Any:
    """The model without DDP's wrapper, which would wait for the other ranks."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def vocabulary(model: Any) -> int:
    return int(model.get_output_embeddings().weight.shape[0])


@contextlib.contextmanager
def scoring_mode(model: Any) -> Iterator[None]:
    """Evaluation mode without gradients, in bf16 on a GPU as validators evaluate; restored afterwards."""
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
    """The base under an adapter, as a context. `ValueError` when there is no adapter."""
    switch = getattr(model, "disable_adapter", None)
    if switch is None:
        raise ValueError("the model has no adapter to switch off: give the base model as reference")
    with switch():
        yield model


def in_halves(
    model: Any, places: list[int], compute: Callable[[list[int]], Found]
) -> Iterator[tuple[list[int], Found]]:
    """Compute the places together, or in halves where the GPU's memory is too small."""
    try:
        result = compute(places)
    except torch.OutOfMemoryError:
        # The ranks of a sharded model wait for each other in every pass: one may not make more of them.
        if len(places) < 2 or is_sharded(model):
            raise
    else:
        yield places, result
        return
    torch.cuda.empty_cache()
    half = len(places) // 2
    yield from in_halves(model, places[:half], compute)
    yield from in_halves(model, places[half:], compute)


def is_sharded(model: Any) -> bool:
    return any(type(weight).__name__ == "DTensor" for weight in model.parameters())


def predict(model: Any, ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], pad: int) -> Predicted:
    """The predictions of the labels, each at the position before it."""
    marked = _padded(labels, IGNORED)
    (predicted,) = _run_model(model, ids, pad, [(marked[:, 1:].ne(IGNORED), marked[:, 1:])])
    return predicted


def predict_and_label(
    model: Any, ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], pad: int
) -> tuple[Predicted, Predicted]:
    """Predict, and return the logits at the labels themselves, in one pass."""
    marked = _padded(labels, IGNORED)
    before, itself = marked[:, 1:].ne(IGNORED), marked.ne(IGNORED)
    before_labels, at_labels = _run_model(model, ids, pad, [(before, marked[:, 1:]), (itself, marked)])
    return before_labels, at_labels


def label_logits(
    model: Any, ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], pad: int
) -> Predicted:
    """The positions of the labels themselves, where evaluation takes the KL; `targets` are the labels."""
    marked = _padded(labels, IGNORED)
    (predicted,) = _run_model(model, ids, pad, [(marked.ne(IGNORED), marked)])
    return predicted


def _run_model(
    model: Any, ids: Sequence[Sequence[int]], pad: int, positions: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> list[Predicted]:
    """One pass. `positions`: pairs of a mask and the targets there."""
    device = next(model.parameters()).device
    tokens = _padded(ids, pad).to(device)
    mask = _padded([[1] * len(row_ids) for row_ids in ids], 0).to(device)
    needed = torch.zeros(tokens.shape[1], dtype=torch.bool)
    for where, _ in positions:
        needed[: where.shape[1]] |= where.any(dim=0)
    places = needed.nonzero().flatten()
    options: dict[str, Any] = {"use_cache": False}
    keeps = keeps_logits(model) and len(places) > 0
    if keeps:
        options["logits_to_keep"] = places.to(device)
    logits = model(input_ids=tokens, attention_mask=mask, **options).logits
    at = needed.cumsum(0) - 1 if keeps else torch.arange(len(needed))
    predicted = []
    for where, targets in positions:
        rows, columns = where.nonzero(as_tuple=True)
        chosen = logits[rows.to(device), at[columns].to(device)]
        predicted.append(Predicted(chosen, targets[rows, columns].to(device), rows.to(device)))
    return predicted


def _padded(values: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
    longest = max(len(row_values) for row_values in values)
    padded = torch.full((len(values), longest), fill, dtype=torch.long)
    for row, row_values in enumerate(values):
        padded[row, : len(row_values)] = torch.as_tensor(list(row_values), dtype=torch.long)
    return padded


def keeps_logits(model: Any) -> bool:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "logits_to_keep" in inspect.signature(inner.forward).parameters


def log_probs(predicted: Predicted) -> torch.Tensor:
    """Log p of each labelled token, in single precision and in pieces: all at once would double the
    memory where no gradients are kept."""
    rows = _piece_rows(predicted)
    pieces = zip(predicted.logits.split(rows), predicted.targets.split(rows), strict=True)
    return torch.cat([_piece(logits.float(), targets) for logits, targets in pieces])


def _piece(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(dim=1)


def _piece_rows(predicted: Predicted) -> int:
    return max(PIECE // (4 * max(predicted.logits.shape[-1], 1)), 1)


def divergence(one: Predicted, other: Predicted) -> torch.Tensor:
    """KL(one || other) at each labelled token, summed over the vocabulary."""
    rows, parts = _piece_rows(one), []
    for own, others in zip(one.logits.split(rows), other.logits.split(rows), strict=True):
        log_own, log_others = own.float().log_softmax(dim=1), others.float().log_softmax(dim=1)
        parts.append((log_own.exp() * (log_own - log_others)).sum(dim=1))
    return torch.cat(parts)


def by_row(values: torch.Tensor, predicted: Predicted, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum and count of the values of each row of the batch, in double precision on the CPU."""
    sums = torch.zeros(count, dtype=torch.float64)
    rows = predicted.rows.cpu()
    sums.index_add_(0, rows, values.double().cpu())
    return sums, torch.bincount(rows, minlength=count)


#: Tokens of a pass, padding included: enough to keep a large GPU busy with any model.
MAX_TOKENS = 16_384
#: Bytes that the logits of a pass may take, with the copy that the loss makes.
LOGIT_BYTES = 4 << 30


def batch_tokens(vocabulary: int) -> int:
    """Return the most tokens of a pass whose logits stay within their share of the memory."""
    return max(min(MAX_TOKENS, LOGIT_BYTES // (8 * vocabulary)), 1)


def length_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Batches of row indices, longest first, so that memory runs out at once or never."""
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    batches: list[list[int]] = []
    for place in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches


def rank_share(
    lengths: Sequence[int], max_tokens: int, rank: int, world: int
) -> list[tuple[list[int], bool]]:
    """The batches of rows rank, rank + world, …, and whether each counts.

    All ranks make equally many passes, as sharded models need: a rank with fewer repeats one, not counted.
    """
    parts = [_batches_of(range(each, len(lengths), world), lengths, max_tokens) for each in range(world)]
    own, rounds = parts[rank], max(map(len, parts))
    spare = (own or parts[0])[-1:]
    return [(batch, True) for batch in own] + [(batch, False) for batch in spare * (rounds - len(own))]


def _batches_of(places: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    batches = length_batches([lengths[place] for place in places], max_tokens)
    return [[places[at] for at in batch] for batch in batches]
