"""Select the files of a folder that are the submission, and the name under which each is published.

Engines leave more beside the model: states to resume from, logs, the other kind of model, copies of the
base. Only what is named here is published, so that nothing of a new engine gets through.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from core.domain.tasks import TaskType
from core.submission.faults import Fault, FaultKind


class SubmissionKind(StrEnum):
    ADAPTER = "adapter"
    FULL = "full"
    IMAGE = "image"


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
#: Path at which evaluators of offers look for an image model (docs/protocol.md).
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
#: Loading one runs whatever code is in it.
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_MODELS = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, WEIGHTS, INDEX)


@dataclass(frozen=True, slots=True)
class FileSelection:
    kind: SubmissionKind
    #: Published name → path in the folder.
    files: dict[str, str]
    #: Files that are not published, each with the reason.
    left_out: tuple[Fault, ...]


def kind_of(names: Iterable[str], task_type: TaskType | None = None) -> SubmissionKind:
    """Decided as evaluators do: by an adapter's configuration at the root."""
    have = set(names)
    if task_type is None and not have & {*_MODELS, CONFIG} and _image_file(have):
        return SubmissionKind.IMAGE
    if task_type is not None and not task_type.is_text:
        return SubmissionKind.IMAGE
    return SubmissionKind.ADAPTER if ADAPTER_CONFIG in have else SubmissionKind.FULL


def select_files(names: Iterable[str], kind: SubmissionKind) -> FileSelection:
    """Select what is published. What is missing is left to the check."""
    have = sorted(set(names))
    files = {name: name for name in have if _belongs(name, kind)}
    if kind is SubmissionKind.IMAGE and (best := _image_file(have)):
        files[IMAGE_WEIGHTS] = best
    selected = set(files.values())
    return FileSelection(kind, files, tuple(_stray(name, kind) for name in have if name not in selected))


def _belongs(name: str, kind: SubmissionKind) -> bool:
    return name in _WHOLE_NAMES[kind] or (kind is SubmissionKind.FULL and SHARD.fullmatch(name) is not None)


def _image_file(names: Iterable[str]) -> str | None:
    """The last file, or the numbered one with the highest number, as evaluators choose."""
    have = sorted(names, key=len)
    last = next((name for name in have if _IMAGE_LAST.fullmatch(name)), None)
    steps = {name: int(match[1]) for name in have if (match := _IMAGE_STEP.fullmatch(name))}
    return last or max(steps, key=steps.__getitem__, default=None)


def _stray(name: str, kind: SubmissionKind) -> Fault:
    if kind is SubmissionKind.ADAPTER and (name in _MODELS or SHARD.fullmatch(name)):
        rule = "a full model beside an adapter: only one kind is published, and the adapter is what counts"
        return Fault(FaultKind.BOTH_KINDS, name, "", rule)
    if name.endswith(_PICKLES):
        rule = "is a pickle, which runs code when it is loaded; save it as safetensors"
        return Fault(FaultKind.PICKLE, name, "", rule)
    return Fault(FaultKind.STRAY, name, "", f"is not part of the {kind} submission; move it elsewhere")
