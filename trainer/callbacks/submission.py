"""The submission: complete at every instant from the first time it is written.

A better model is written beside the folder, cleaned, checked, and put in its place in one step. What it
scored is remembered outside of it, by the folder's own identity: whichever folder is there after a death,
its score is the right one, so that a later attempt does not replace a better model with a worse one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.run_files import Score
from trainer.callbacks.swap import beside, put_in_place, restore
from trainer.callbacks.weights import header, is_whole
from trainer.errors import TrainingError

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
#: What describes a model besides its weights; a fine-tune keeps the base's own, unchanged.
DESCRIPTION = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
#: What the hub takes for a model's name; anything else in the front matter makes it reject the commit.
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class BadSubmission(TrainingError):
    """What the engine wrote is no submission."""

    code = "bad_submission"


@dataclass
class Submission:
    place: Path
    model_id: str
    #: The base model's folder.
    base: Path

    def prepare(self) -> None:
        """Once, by one process: what an earlier attempt left half done is put in order."""
        self.place.parent.mkdir(parents=True, exist_ok=True)
        restore(self.place)

    @property
    def exists(self) -> bool:
        return self.place.is_dir() and kind_of(self.place) is not None

    @property
    def score(self) -> Score | None:
        """Of the folder that is there; None when nothing is known of it."""
        known = self._ledger().get(_identity(self.place)) if self.place.is_dir() else None
        return Score.model_validate(known) if known else None

    def put(self, write: Callable[[Path], None], score: Score | None) -> None:
        """`write` fills an empty folder with the weights. `BadSubmission` when that made no whole model."""
        new = beside(self.place, "new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(mode=0o755)
        try:
            write(new)
            self.finish(new)
            self._note(new, score)
            put_in_place(new, self.place)
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def finish(self, folder: Path) -> None:
        """The engine's output as a submission: the weights, what belongs to them, and nothing else."""
        kind = kind_of(folder)
        if kind is None:
            raise BadSubmission(f"{folder} holds no whole weights: {sorted(os.listdir(folder))}")
        if kind == "adapter":
            _clean_adapter(folder, self.model_id)
        else:
            _describe_full(folder, self.base)
        _remove_foreign(folder, kind)
        (folder / "README.md").write_text(_card(self.model_id, kind), encoding="utf-8")
        for file in folder.iterdir():
            file.chmod(0o644)  # safetensors writes 0600, which another user cannot upload

    def _note(self, folder: Path, score: Score | None) -> None:
        kept = {_identity(folder): score.model_dump() if score else None}
        if self.place.is_dir():
            here = _identity(self.place)
            kept[here] = self._ledger().get(here)
        ledger = beside(self.place, "scores.json")
        half = beside(self.place, "scores.half")
        half.write_text(json.dumps(kept), encoding="utf-8")
        half.rename(ledger)

    def _ledger(self) -> dict[str, Any]:
        try:
            found = json.loads(beside(self.place, "scores.json").read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _identity(folder: Path) -> str:
    """A rename keeps it; no two folders of one file system have the same at the same time."""
    return str(folder.stat().st_ino)


def kind_of(folder: Path) -> str | None:
    """ "adapter" or "full" when whole weights lie there, else None."""
    if (folder / ADAPTER_CONFIG).is_file() and is_whole(folder / ADAPTER_WEIGHTS):
        return "adapter"
    if is_whole(folder / WEIGHTS):
        return "full"
    return "full" if _shards_whole(folder) else None


def _shards_whole(folder: Path) -> bool:
    try:
        index = json.loads((folder / INDEX).read_text("utf-8"))
        shards = set(index["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False
    return bool(shards) and all(is_whole(folder / str(shard)) for shard in shards)


def _clean_adapter(folder: Path, model_id: str) -> None:
    """Evaluators load the base by the name in here, with an older PEFT: what says nothing is left out."""
    path = folder / ADAPTER_CONFIG
    config = {key: value for key, value in json.loads(path.read_text("utf-8")).items() if value is not None}
    config |= {"base_model_name_or_path": model_id, "inference_mode": True}
    config.pop("revision", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def _describe_full(folder: Path, base: Path) -> None:
    """Validators compare a full model's config with the base's, field by field, and evaluate with the base's
    tokenizer: so both are the base's own files, whatever the engine made of them."""
    for name in DESCRIPTION:
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
    path = folder / CONFIG
    if not path.is_file():
        return
    config = json.loads(path.read_text("utf-8"))
    dtype = _dtype_of(folder)
    for key in ("torch_dtype", "dtype"):
        if dtype and key in config:
            config[key] = dtype
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _dtype_of(folder: Path) -> str | None:
    """The format that most of the weights are in."""
    first = next(iter(sorted(folder.glob("model*.safetensors"))), None)
    entries = header(first) if first else None
    kinds = [entry["dtype"] for name, entry in (entries or {}).items() if name != "__metadata__"]
    return _DTYPES.get(max(set(kinds), key=kinds.count)) if kinds else None


def _remove_foreign(folder: Path, kind: str) -> None:
    """Reference adapters, training arguments, checkpoints: everything in here would be uploaded."""
    for entry in list(folder.iterdir()):
        if _belongs(entry, kind):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _belongs(entry: Path, kind: str) -> bool:
    if entry.is_dir() or entry.is_symlink():
        return False
    if kind == "adapter":
        # No tokenizer: evaluators use the base's, and PEFT would resize the embeddings to one that lies here.
        return entry.name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    return entry.name in (*DESCRIPTION, WEIGHTS, INDEX) or _SHARD.fullmatch(entry.name) is not None


def _card(model_id: str, kind: str) -> str:
    """Front matter that the hub accepts; a local path as base model makes it refuse the commit."""
    lines = ["---"]
    if _HUB_NAME.fullmatch(model_id):
        lines.append(f"base_model: {model_id}")
    lines += [f"library_name: {'peft' if kind == 'adapter' else 'transformers'}", "---", ""]
    return "\n".join(lines)
