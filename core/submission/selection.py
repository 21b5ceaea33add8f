"""Which files of a folder are the submission, and under which name each is published.

What an engine leaves beside the model (states to resume from, logs, the other kind of model, whole copies of
the base) is known by not being named here: a list of what belongs has no gaps that a new engine falls into.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from core.submission.faults import Fault, FaultKind
from core.tasks import TaskType


class SubmissionKind(StrEnum):
    ADAPTER = "adapter"
    FULL = "full"
    IMAGE = "image"


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
#: Where evaluators of the offer era look for an image model (docs/protocol.md).
IMAGE_WEIGHTS = "checkpoint/last.safetensors"
CARD = "README.md"

SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_IMAGE_LAST = re.compile(r"(?:checkpoint/|checkpoints/)?last\.safetensors")
_IMAGE_STEP = re.compile(r"(?:checkpoint/|checkpoints/)?last-(\d{1,9})\.safetensors")

_COMMON = {CARD, "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "NOTICE.md", "NOTICE.txt", "USE_POLICY.md"}
_TOKENIZER = {
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
}
_WHOLE_NAMES = {
    SubmissionKind.ADAPTER: _COMMON | _TOKENIZER | {ADAPTER_CONFIG, ADAPTER_WEIGHTS},
    SubmissionKind.FULL: _COMMON | _TOKENIZER | {CONFIG, WEIGHTS, INDEX, "generation_config.json"},
    SubmissionKind.IMAGE: _COMMON,
}
#: Loading one runs whatever code is in it; nobody should have to.
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_MODELS = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, WEIGHTS, INDEX)


@dataclass(frozen=True, slots=True)
class Selection:
    kind: SubmissionKind
    #: The name it is published under → its path in the folder.
    files: dict[str, str]
    #: What is not published, each with the reason.
    left_out: tuple[Fault, ...]


def kind_of(names: Iterable[str], task_type: TaskType | None = None) -> SubmissionKind:
    """An adapter's configuration at the root decides for evaluators, so it does here."""
    have = set(names)
    if task_type is TaskType.IMAGE or (task_type is None and not have & {*_MODELS, CONFIG} and _image(have)):
        return SubmissionKind.IMAGE
    return SubmissionKind.ADAPTER if ADAPTER_CONFIG in have else SubmissionKind.FULL


def select(names: Iterable[str], kind: SubmissionKind) -> Selection:
    """What of these is published. Nothing is said here of what is missing."""
    have = sorted(set(names))
    files = {name: name for name in have if _belongs(name, kind)}
    if kind is SubmissionKind.IMAGE and (best := _image(have)):
        files[IMAGE_WEIGHTS] = best
    taken = set(files.values())
    return Selection(kind, files, tuple(_stray(name, kind) for name in have if name not in taken))


def _belongs(name: str, kind: SubmissionKind) -> bool:
    return name in _WHOLE_NAMES[kind] or (kind is SubmissionKind.FULL and SHARD.fullmatch(name) is not None)


def _image(names: Iterable[str]) -> str | None:
    """The last one; with several that are numbered, the highest, as evaluators choose."""
    have = sorted(names, key=len)
    last = next((name for name in have if _IMAGE_LAST.fullmatch(name)), None)
    steps = {name: int(found[1]) for name in have if (found := _IMAGE_STEP.fullmatch(name))}
    return last or max(steps, key=steps.__getitem__, default=None)


def _stray(name: str, kind: SubmissionKind) -> Fault:
    if kind is SubmissionKind.ADAPTER and (name in _MODELS or SHARD.fullmatch(name)):
        rule = "a full model beside an adapter: only one kind is published, and the adapter is what counts"
        return Fault(FaultKind.BOTH_KINDS, name, "", rule)
    if name.endswith(_PICKLES):
        rule = "is a pickle, which runs code when it is loaded; save as safetensors"
        return Fault(FaultKind.PICKLE, name, "", rule)
    return Fault(FaultKind.STRAY, name, "", f"is no part of the {kind} submission; move it elsewhere")
