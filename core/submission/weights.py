"""The weights of a submission as a whole: every shard there, every tensor once, embeddings of their size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from core.submission.documents import Item, json_object
from core.submission.faults import Fault, FaultKind, shown
from core.submission.safetensors import Header, Tensor
from core.submission.selection import ADAPTER_WEIGHTS, IMAGE_WEIGHTS, INDEX, SHARD, WEIGHTS, SubmissionKind

_EMBEDDINGS = (
    "embed_tokens.weight",
    "lm_head.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "embed_out.weight",
)
#: What wrappers of a training put into names when a model is saved through them: nothing finds them again.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module.")
_ANYWHERE = _WRAPPERS[:3]
WEIGHTS_OF = {SubmissionKind.ADAPTER: ADAPTER_WEIGHTS, SubmissionKind.IMAGE: IMAGE_WEIGHTS}


def shards(names: Set[str], index: Item | None) -> Iterator[Fault]:
    """Whether a full model's files make one whole model."""
    found = sorted(name for name in names if SHARD.fullmatch(name))
    if WEIGHTS in names and found:
        rule = "a whole model beside a model in parts: loaders take the first; keep the newer one only"
        yield Fault(FaultKind.BOTH_KINDS, WEIGHTS, f"{len(found)} parts beside it", rule)
    elif WEIGHTS not in names and not found:
        yield Fault(FaultKind.MISSING, WEIGHTS, "", "is missing: there are no weights to publish")
    if not found:
        return
    totals = {name.split("-of-")[1] for name in found}
    wanted = int(totals.pop().split(".")[0]) if len(totals) == 1 else -1
    numbers = {int(name[6:11]) for name in found}
    if numbers != set(range(1, wanted + 1)):
        rule = "must be all parts of one model, numbered from 1; remove those of an earlier save"
        yield Fault(FaultKind.BAD_INDEX, found[0], f"{len(found)} parts in all", rule)
    if index is None:
        yield Fault(FaultKind.MISSING, INDEX, "", "is missing: without it the parts are not found")


def indexed(names: Set[str], headers: Mapping[str, Header], index: Item) -> Iterator[Fault]:
    """Whether the index names every tensor, in the part where it is."""
    found = json_object(INDEX, index)
    if isinstance(found, Fault):
        yield found
        return
    where = found.get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(part, str) for part in where.values()):
        yield Fault(FaultKind.BAD_INDEX, f"{INDEX}: weight_map", "", "must be an object of tensors and files")
        return
    have = {tensor: part for part, header in headers.items() for tensor in header.tensors}
    wrong = sorted(name for name in where.keys() | have.keys() if where.get(name) != have.get(name))
    if wrong and names >= headers.keys():
        value = f"{len(wrong)} tensors elsewhere than it says, the first {shown(wrong[0], 80)}"
        yield Fault(FaultKind.BAD_INDEX, INDEX, value, "does not fit the parts; save the model again")


def contents(
    name: str,
    header: Header,
    kind: SubmissionKind,
    vocabulary: int | None,
    not_finite: tuple[int, tuple[str, ...]],
) -> Iterator[Fault]:
    """What is wrong with the tensors of one file."""
    if not any(tensor.count for tensor in header.tensors.values()):
        yield Fault(FaultKind.NO_WEIGHTS, name, "", "holds no weights at all; save the model again")
    count, first = not_finite
    if count:
        rule = "weights must be finite: the training diverged, or was saved in a type that is too small"
        value = f"NaN or infinity in {count} of {len(header.tensors)} tensors ({shown(', '.join(first))})"
        yield Fault(FaultKind.NOT_FINITE, name, value, rule)
    wrapped = next((tensor for tensor in header.tensors if _is_wrapped(tensor)), None)
    if wrapped:
        rule = "names of a wrapper around the model, which nothing finds again; unwrap it before saving"
        yield Fault(FaultKind.WRAPPED, name, shown(wrapped, 80), rule)
    if vocabulary is not None and kind is not SubmissionKind.IMAGE:
        yield from _embeddings(name, header.tensors.values(), vocabulary)


def _embeddings(name: str, tensors: Any, vocabulary: int) -> Iterator[Fault]:
    for tensor in tensors:
        if _is_embedding(tensor) and tensor.shape[0] != vocabulary:
            rule = f"must have the base model's {vocabulary:,} rows: add no tokens, resize nothing"
            yield Fault(
                FaultKind.VOCABULARY, f"{name}: {shown(tensor.name)}", f"{tensor.shape[0]:,} rows", rule
            )


def _is_embedding(tensor: Tensor) -> bool:
    return len(tensor.shape) == 2 and tensor.name.endswith(_EMBEDDINGS)


def _is_wrapped(name: str) -> bool:
    return name.startswith(_WRAPPERS) or any(wrapper in name for wrapper in _ANYWHERE)
