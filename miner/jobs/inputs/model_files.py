"""Which files of a model's repository are fetched: weights once, as safetensors, and what reads them.

Repositories hold the same weights three times over (PyTorch pickles, TensorFlow, GGUF, "original" layouts).
Pickles run code when they are loaded, and so do a repository's own .py files: neither is ever fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from core.tasks import ImageModelType
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason

INDEX = "model.safetensors.index.json"
#: A single file of at least this size at the root of an image model's repository is all of the model.
SINGLE_FILE_BYTES = 6 * 10**9
#: Configurations and tokenizers are megabytes; what is larger is something else.
MAX_SMALL = 200 * 10**6

_SAFE_PART = re.compile(r"[^/\\\0.][^/\\\0]*|\.[^/\\\0.][^/\\\0]*")
_SMALL = re.compile(
    r".*\.(json|jinja|model|txt|tiktoken)|tokenizer.*|(README\.md|LICEN[CS]E.*|NOTICE.*)", re.IGNORECASE
)
_WRONG_SMALL = re.compile(r".*\.(py|bin|pt|pth|pkl|h5|onnx|gguf|safetensors)|.*\.bin\.index\.json|\..*")
_TOKENIZERS = re.compile(r"tokenizer\.json|.*\.model|vocab\.(json|txt)|.*\.tiktoken|tekken\.json")
_PICKLED = re.compile(r".*\.(bin|pt|pth|pkl|ckpt)$")
_DIFFUSION = re.compile(r".*\.(json|txt|model|safetensors|jinja)")


@dataclass(frozen=True)
class Listed:
    """A file as the hub lists it."""

    path: str
    size: int
    #: Of large files the hash of the content, of small ones git's name of the blob.
    sha256: str | None
    blob_id: str | None


@dataclass(frozen=True)
class Selection:
    files: tuple[Listed, ...]
    #: The one file that is the model, where it is not the folder.
    single: str | None = None

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(file.path for file in self.files)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


def small_files(listed: Iterable[Listed]) -> list[Listed]:
    """What lies at the root beside the weights: configuration, tokenizer, licence."""
    return [
        file
        for file in listed
        if "/" not in file.path
        and file.size <= MAX_SMALL
        and _SMALL.fullmatch(file.path)
        and not _WRONG_SMALL.fullmatch(file.path)
    ]


def text_model(listed: Sequence[Listed], index: bytes | None) -> Selection:
    """`index` is the content of model.safetensors.index.json, if the repository has one."""
    by_path = {file.path: file for file in listed if is_safe(file.path)}
    small = small_files(by_path.values())
    names = {file.path for file in small}
    if "config.json" not in names:
        raise _bad(_no_config(by_path))
    if not any(_TOKENIZERS.fullmatch(name) for name in names):
        raise _bad("the repository has no tokenizer (tokenizer.json, tokenizer.model, vocab.json …)")
    weights = _shards(by_path, index) if index is not None else _loose_weights(by_path)
    return Selection((*small, *weights))


def image_model(listed: Sequence[Listed], _kind: ImageModelType) -> Selection:
    """As the validators' own downloader: the largest single file at the root, or the folders of diffusers."""
    safe = [file for file in listed if is_safe(file.path)]
    whole = [file for file in safe if "/" not in file.path and file.path.endswith(".safetensors")]
    largest = max(whole, key=lambda file: file.size, default=None)
    if largest is not None and largest.size > SINGLE_FILE_BYTES:
        return Selection((largest,), largest.path)
    names = {file.path for file in safe}
    kept = [file for file in safe if _DIFFUSION.fullmatch(file.path) and not _is_variant(file.path, names)]
    weights = [file for file in kept if file.path.endswith(".safetensors")]
    if not weights:
        raise _bad(_no_weights(names))
    if len(weights) == 1 and "/" not in weights[0].path:
        return Selection((weights[0],), weights[0].path)
    return Selection(tuple(kept))


def is_safe(path: str) -> bool:
    """Whether a name from the hub stays inside the folder that it is put into."""
    return len(path) < 500 and all(_SAFE_PART.fullmatch(part) for part in path.split("/"))


def _shards(by_path: Mapping[str, Listed], index: bytes) -> list[Listed]:
    try:
        names = sorted({str(name) for name in json.loads(index)["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _bad(f"{INDEX} is no index of weights") from None
    missing = [name for name in names if not name.endswith(".safetensors") or name not in by_path]
    if missing or not names:
        raise _bad(f"{INDEX} names files that are not there: {', '.join(missing[:3]) or 'none at all'}")
    return [by_path[name] for name in names]


def _loose_weights(by_path: Mapping[str, Listed]) -> list[Listed]:
    if "model.safetensors" in by_path:
        return [by_path["model.safetensors"]]
    found = [
        file
        for path, file in by_path.items()
        if path.endswith(".safetensors")
        and "/" not in path
        and not path.startswith(("adapter_model", "consolidated"))
        and not _is_variant(path, by_path)
    ]
    if not found:
        raise _bad(_no_weights(by_path))
    return found


def _is_variant(path: str, names: Iterable[str]) -> bool:
    """`model.fp16.safetensors` beside `model.safetensors`."""
    name = PurePosixPath(path)
    plain = re.sub(r"\.(fp16|fp32|bf16|non_ema|ema)(?=[.-])", "", name.name)
    return plain != name.name and str(name.with_name(plain)) in names


def _no_config(names: Iterable[str]) -> str:
    if "adapter_config.json" in names:
        return "the repository is an adapter (adapter_config.json), not a base model"
    return "the repository has no config.json"


def _no_weights(names: Iterable[str]) -> str:
    pickled = sorted(name for name in names if _PICKLED.fullmatch(name))
    if pickled:
        return f"the weights are there as pickles only ({pickled[0]}), and loading those would run code"
    return "the repository has no safetensors weights"


def _bad(why: str) -> StepFailed:
    return StepFailed(EndReason.BAD_MODEL, why)
