"""Selection of the files of a model's repository, and the check that a directory is a loadable model.

Repositories hold the same weights several times (PyTorch pickles, TensorFlow, GGUF). Pickles run code when
loaded, and so do a repository's own .py files: neither is ever fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from core.domain.job_states import EndReason, StepFailed
from core.domain.tasks import ImageModelType
from core.models.facts import ModelFacts
from core.models.identify import facts_from_config, image_model_facts
from core.submission.safetensors import BadHeader, read_header

INDEX = "model.safetensors.index.json"
#: A single file of at least this size at the root of an image model's repository is the whole model.
SINGLE_FILE_BYTES = 6 * 10**9
#: Configurations and tokenizers are megabytes; a larger file is something else.
MAX_SMALL = 200 * 10**6

_SAFE_PART = re.compile(r"[^/\\\0.][^/\\\0]*|\.[^/\\\0.][^/\\\0]*")
_SMALL = re.compile(
    r".*\.(json|jinja|model|txt|tiktoken)|tokenizer.*|(README\.md|LICEN[CS]E.*|NOTICE.*)", re.IGNORECASE
)
_EXCLUDED_SMALL = re.compile(r".*\.(py|bin|pt|pth|pkl|h5|onnx|gguf|safetensors)|.*\.bin\.index\.json|\..*")
_TOKENIZERS = re.compile(r"tokenizer\.json|.*\.model|vocab\.(json|txt)|.*\.tiktoken|tekken\.json")
_PICKLED = re.compile(r".*\.(bin|pt|pth|pkl|ckpt)$")
_DIFFUSION = re.compile(r".*\.(json|txt|model|safetensors|jinja)")


@dataclass(frozen=True)
class HubFile:
    """A file as the hub lists it."""

    path: str
    size: int
    #: The hash of the content for large files; small ones have git's hash of the blob.
    sha256: str | None
    blob_id: str | None


@dataclass(frozen=True)
class ModelFileSelection:
    files: tuple[HubFile, ...]
    #: The file that is the whole model, if it is not the directory.
    single: str | None = None

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(file.path for file in self.files)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


def small_files(listed: Iterable[HubFile]) -> list[HubFile]:
    """The files at the root beside the weights: configuration, tokenizer, licence."""
    return [
        file
        for file in listed
        if "/" not in file.path
        and file.size <= MAX_SMALL
        and _SMALL.fullmatch(file.path)
        and not _EXCLUDED_SMALL.fullmatch(file.path)
    ]


def select_text_model(listed: Sequence[HubFile], index: bytes | None) -> ModelFileSelection:
    """`index` is the content of model.safetensors.index.json, if the repository has one."""
    by_path = {file.path: file for file in listed if is_safe_path(file.path)}
    small = small_files(by_path.values())
    names = {file.path for file in small}
    if "config.json" not in names:
        raise _bad(_no_config(by_path))
    if not any(_TOKENIZERS.fullmatch(name) for name in names):
        raise _bad("the repository has no tokenizer (tokenizer.json, tokenizer.model, vocab.json …)")
    weights = _shards(by_path, index) if index is not None else _loose_weights(by_path)
    return ModelFileSelection((*small, *weights))


def select_image_model(listed: Sequence[HubFile]) -> ModelFileSelection:
    """Select as the validators' downloader does: the largest root file, or diffusers' directories."""
    safe = [file for file in listed if is_safe_path(file.path)]
    whole = [file for file in safe if "/" not in file.path and file.path.endswith(".safetensors")]
    largest = max(whole, key=lambda file: file.size, default=None)
    if largest is not None and largest.size > SINGLE_FILE_BYTES:
        return ModelFileSelection((largest,), largest.path)
    names = {file.path for file in safe}
    kept = [file for file in safe if _DIFFUSION.fullmatch(file.path) and not _is_variant(file.path, names)]
    weights = [file for file in kept if file.path.endswith(".safetensors")]
    if not weights:
        raise _bad(_no_weights(names))
    if len(weights) == 1 and "/" not in weights[0].path:
        return ModelFileSelection((weights[0],), weights[0].path)
    return ModelFileSelection(tuple(kept))


def is_safe_path(path: str) -> bool:
    """Return True if a name from the hub stays inside the model's directory."""
    return len(path) < 500 and all(_SAFE_PART.fullmatch(part) for part in path.split("/"))


def _shards(by_path: Mapping[str, HubFile], index: bytes) -> list[HubFile]:
    try:
        names = sorted({str(name) for name in json.loads(index)["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _bad(f"{INDEX} is not an index of weights") from None
    missing = [name for name in names if not name.endswith(".safetensors") or name not in by_path]
    if missing or not names:
        raise _bad(f"{INDEX} names missing files: {', '.join(missing[:3]) or 'none at all'}")
    return [by_path[name] for name in names]


def _loose_weights(by_path: Mapping[str, HubFile]) -> list[HubFile]:
    if "model.safetensors" in by_path:
        return [by_path["model.safetensors"]]
    weights = [
        file
        for path, file in by_path.items()
        if path.endswith(".safetensors")
        and "/" not in path
        and not path.startswith(("adapter_model", "consolidated"))
        and not _is_variant(path, by_path)
    ]
    if not weights:
        raise _bad(_no_weights(by_path))
    return weights


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
        return f"the weights are pickles only ({pickled[0]}), and loading those would run code"
    return "the repository has no safetensors weights"


def _bad(why: str) -> StepFailed:
    return StepFailed(EndReason.BAD_MODEL, why)


MAX_CONFIG = 10 * 1024**2


def checked_facts(path: Path, model: str, image_type: ImageModelType | None) -> ModelFacts:
    """The facts by the model's config.json and the headers of all its weights; `StepFailed` (BAD_MODEL)."""
    weights = [path] if path.is_file() else sorted(path.rglob("*.safetensors"))
    if not weights:
        raise _bad(f"{path.name} has no safetensors weights")
    count = count_parameters(weights)
    if image_type is not None:
        return image_model_facts(model, image_type)
    return facts_from_config(read_config(path), model, count)


def count_parameters(weights: Iterable[Path]) -> int:
    """Count the parameters by the headers, each of which must fit its file."""
    total = 0
    for file in weights:
        try:
            with file.open("rb") as opened:
                total += sum(tensor.count for tensor in read_header(opened).tensors.values())
        except BadHeader as error:
            raise _bad(f"{file.name} {error}") from None
    return total


def read_config(folder: Path) -> dict[str, object]:
    path = folder / "config.json"
    try:
        if path.stat().st_size > MAX_CONFIG:
            raise _bad("config.json is too large")
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _bad("there is no config.json") from None
    except (ValueError, RecursionError):
        raise _bad("config.json is not JSON") from None
    if not isinstance(config, dict):
        raise _bad("config.json is not a JSON object")
    return config
