"""Read a folder that somebody else wrote, and select the files of it that are the submission.

Only regular files are opened, no link is followed, and no content is trusted.

Engines leave more beside the model: states to resume from, logs, the other kind of model, copies of the
base. Only what is named here is published, so that nothing of a new engine gets through.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from core.domain.tasks import TaskType
from core.submission.faults import BadSubmission, Fault, FaultKind, printable

#: Far more than any submission has; more is an attack or a mistake.
MAX_ENTRIES = 20_000
MAX_DEPTH = 12
#: Differs whenever a file's content may differ: device, inode, size, time of the last write.
FileIdentity = tuple[int, int, int, int]
_PLAIN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
#: Configurations and cards are kilobytes; the index of a mixture of experts with many shards is megabytes.
MAX_DOCUMENT = 32_000_000
SubmissionItem = Path | bytes
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
#: Loading one runs whatever code is in it.
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_MODELS = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, WEIGHTS, INDEX)


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """A regular file, by its path inside the folder."""

    path: str
    size: int
    identity: FileIdentity


@dataclass(frozen=True, slots=True)
class FolderListing:
    files: tuple[FolderEntry, ...]
    #: Links, pipes, sockets, devices, unreadable folders, unprintable names.
    faults: tuple[Fault, ...]

    def names(self) -> frozenset[str]:
        return frozenset(entry.path for entry in self.files)


def list_folder(folder: Path) -> FolderListing:
    """List every regular file below `folder`, sorted by path. `BadSubmission` if it is not a folder, or too
    large."""
    files: list[FolderEntry] = []
    faults: list[Fault] = []
    try:
        for entry in _walk(folder, "", 0):
            (files if isinstance(entry, FolderEntry) else faults).append(entry)  # type: ignore[arg-type]
            if len(files) + len(faults) > MAX_ENTRIES:
                raise _too_much(folder, f"more than {MAX_ENTRIES} entries")
    except OSError as error:
        rule = f"cannot be read: {error.strerror or error}"
        raise BadSubmission(str(folder), [Fault(FaultKind.UNREADABLE, str(folder), "", rule)]) from None
    return FolderListing(tuple(sorted(files, key=lambda entry: entry.path)), tuple(faults))


def _walk(folder: Path, inside: str, depth: int) -> Iterator[FolderEntry | Fault]:
    if depth > MAX_DEPTH:
        raise _too_much(folder, f"folders {MAX_DEPTH} deep")
    with os.scandir(folder) as entries:
        for entry in entries:
            path = f"{inside}{entry.name}"
            status = entry.stat(follow_symlinks=False)
            if not entry.name.isprintable():
                yield Fault(FaultKind.BAD_NAME, printable(path), "", "a file's name must be printable text")
            elif stat.S_ISDIR(status.st_mode):
                try:
                    yield from _walk(Path(entry.path), f"{path}/", depth + 1)
                except PermissionError as error:
                    yield Fault(FaultKind.UNREADABLE, path, "", f"cannot be read: {error.strerror}")
            elif stat.S_ISREG(status.st_mode):
                yield FolderEntry(path, status.st_size, file_identity(status))
            else:
                mode = stat.filemode(status.st_mode)
                rule = "only regular files and folders belong here: no links, pipes, sockets or devices"
                yield Fault(FaultKind.NOT_A_FILE, path, f"mode {mode}", rule)


def file_identity(status: os.stat_result) -> FileIdentity:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def open_plain(path: Path) -> int:
    """Open a regular file, and `OSError` for anything else: no link is followed, no pipe waited for."""
    opened = os.open(path, _PLAIN)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return opened


def read_plain(path: Path, limit: int) -> bytes:
    """Read a small file; `OSError` if it is larger than `limit` or not a regular file."""
    with open(open_plain(path), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"is larger than {limit:,} bytes", str(path))
    return data


def _too_much(folder: Path, value: str) -> BadSubmission:
    rule = "that is not a submission; look for what wrote it, and keep only the model's own files"
    return BadSubmission(str(folder), [Fault(FaultKind.TOO_MUCH, str(folder), value, rule)])


def read_item(item: SubmissionItem, limit: int = MAX_DOCUMENT) -> bytes:
    return read_plain(item, limit) if isinstance(item, Path) else item


def json_object(name: str, item: SubmissionItem) -> dict[str, Any] | Fault:
    """The object in a JSON file, or what is wrong with it."""
    try:
        value = json.loads(read_item(item))
    except OSError as error:
        return Fault(FaultKind.UNREADABLE, name, "", f"cannot be read: {error.strerror or error}")
    except (ValueError, RecursionError) as error:
        rule = f"is not valid JSON: {printable(str(error), 100)}; save it again"
        return Fault(FaultKind.BAD_JSON, name, "", rule)
    if not isinstance(value, dict):
        return Fault(FaultKind.BAD_JSON, name, type(value).__name__, "must be a JSON object; save it again")
    return value


def to_json(value: dict[str, Any]) -> bytes:
    """JSON as transformers and peft write it. Lone surrogates, which UTF-8 cannot encode, stay escapes."""
    text = json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True)
    return text.encode(errors="backslashreplace") + b"\n"


class SubmissionKind(StrEnum):
    ADAPTER = "adapter"
    FULL = "full"
    IMAGE = "image"


_WHOLE_NAMES = {
    SubmissionKind.ADAPTER: _COMMON | _TOKENIZER | {ADAPTER_CONFIG, ADAPTER_WEIGHTS},
    SubmissionKind.FULL: _COMMON | _TOKENIZER | {CONFIG, WEIGHTS, INDEX, "generation_config.json"},
    SubmissionKind.IMAGE: _COMMON,
}


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
