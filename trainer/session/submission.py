"""The submission: complete at every instant from the first time it is written.

A better model is written beside the folder, cleaned, checked, and put in its place in one step. What it
scored, or how far its training was, is remembered outside of it, by the folder's own identity: whichever
folder is there after a death, the record is the right one, so that a later attempt does not replace a better
model with a worse one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from core.domain.tasks import ImageModelType, TaskType
from core.runs.run_files import HeldOutScore
from core.submission.check import BaseModelRef, DigestFile, examine
from core.submission.digests import FileDigest, OnBytesRead, check_weights
from core.submission.faults import BadSubmission, Fault, FaultKind
from core.submission.folder import CONFIG, SubmissionKind, list_folder, open_plain, select_files
from core.submission.folder import kind_of as kind_by_names
from core.submission.prepare import mend_in_place
from core.submission.safetensors import SafetensorsHeader, read_header
from core.submission.swap import put_in_place, recover_swap
from core.system.files import write_atomically

#: What describes a model besides its weights: a fine-tune keeps the base's own, unchanged.
DESCRIPTION = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class TrainedSteps(NamedTuple):
    """Training progress of an unscored submission."""

    step: int
    #: By this two submissions are compared; 0: unknown.
    worth: float


@dataclass
class Submission:
    place: Path
    model_id: str
    #: The base model's folder (or file).
    base: Path
    task_type: TaskType | None = None
    image_type: ImageModelType | None = None
    #: What is worth knowing of the newest one.
    remarks: tuple[Fault, ...] = ()

    def prepare(self) -> None:
        """Once, by one process: clean up what an earlier attempt left unfinished."""
        self.place.parent.mkdir(parents=True, exist_ok=True)
        recover_swap(self.place)
        shutil.rmtree(self.beside("new"), ignore_errors=True)

    @property
    def exists(self) -> bool:
        return (
            self.place.is_dir() and submission_kind(self.place, self.task_type, self.image_type) is not None
        )

    @property
    def score(self) -> HeldOutScore | None:
        """The score of the existing folder; None when it is unknown."""
        known = self._record().get("score")
        return HeldOutScore.model_validate(known) if known else None

    @property
    def base_score(self) -> HeldOutScore | None:
        """The untouched model's score on the rows of `score`."""
        known = self._record().get("base")
        return HeldOutScore.model_validate(known) if known else None

    @property
    def trained(self) -> TrainedSteps | None:
        """Training progress of the existing folder, or None if nothing there could be submitted."""
        if not self.exists:
            return None
        try:
            step, worth = self._record()["trained"]
            return TrainedSteps(int(step), float(worth))
        except (KeyError, TypeError, ValueError):
            return TrainedSteps(0, 0.0)

    def put(
        self,
        write: Callable[[Path], None],
        score: HeldOutScore | None,
        trained: TrainedSteps | None = None,
        base: HeldOutScore | None = None,
    ) -> None:
        """`write` fills an empty folder with the weights. `BadSubmission` when the result is not a complete
        model. `base`: the untouched model's score."""
        new = self.beside("new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True, mode=0o755)
        try:
            write(new)
            self._finish(new)
            scores = {"score": score, "base": base}
            known = {name: item.model_dump() for name, item in scores.items() if item is not None}
            self._note(new, {**known, "trained": trained})
            put_in_place(new, self.place)
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def beside(self, kind: str) -> Path:
        """A path next to the folder that no upload includes."""
        return self.place.parent / f".{self.place.name}.{kind}"

    def _finish(self, folder: Path) -> None:
        """Turn the engine's output into a submission: the weights, what belongs to them, and nothing else."""
        kind = kind_by_names(list_folder(folder).names(), self.task_type)
        if kind is SubmissionKind.FULL:
            describe(folder, self.base)
        items = mend_in_place(folder, self._base(), self.task_type).items
        if kind is SubmissionKind.ADAPTER:
            # PEFT resizes the base's embeddings to a tokenizer that lies beside an adapter; there is no need.
            items = {name: item for name, item in items.items() if name not in DESCRIPTION}
        # An image model's only file is published under another name than it has here.
        kept = {name for name, item in items.items() if isinstance(item, bytes)}
        kept |= {str(item.relative_to(folder)) for item in items.values() if isinstance(item, Path)}
        _remove_others(folder, kept)
        report = examine(items, kind, self._base(), digest=_digest(kind))
        self.remarks = report.remarks
        # A model whose name the hub would reject gets none in its card: that is no reason to refuse the
        # model.
        serious = [fault for fault in report.faults if fault.kind is not FaultKind.BAD_CARD]
        if serious:
            raise BadSubmission(str(folder), serious)

    def _base(self) -> BaseModelRef:
        return BaseModelRef(self.model_id, self.base if self.base.is_dir() else None, self.image_type)

    def _note(self, folder: Path, record: dict[str, Any]) -> None:
        kept = {_identity(folder): record}
        if self.place.is_dir():
            kept[_identity(self.place)] = self._record()
        write_atomically(self.beside("scores.json"), json.dumps(kept).encode(), mode=0o644)

    def _record(self) -> dict[str, Any]:
        """Return the record of the existing folder."""
        try:
            record = json.loads(self.beside("scores.json").read_text("utf-8"))[_identity(self.place)]
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return record if isinstance(record, dict) else {}


def _identity(folder: Path) -> str:
    """An identity that survives renaming; an inode number alone is reused as soon as it is free."""
    stat = folder.stat()
    return f"{stat.st_ino} {stat.st_mtime_ns}"


def submission_kind(
    folder: Path, task_type: TaskType | None = None, image_type: ImageModelType | None = None
) -> SubmissionKind | None:
    """The kind of a complete submission; None for anything else. Of text models headers alone are read."""
    try:
        names = list_folder(folder).names()
        kind = kind_by_names(names, task_type)
        items = {name: folder / path for name, path in select_files(names, kind).files.items()}
        faults = examine(items, kind, BaseModelRef(image_type=image_type), digest=_digest(kind)).faults
    except BadSubmission:
        return None
    return kind if not faults else None


def describe(folder: Path, base: Path) -> None:
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
    if dtype:
        # A base that came quantised was trained as plain numbers, and these are what lies here.
        config.pop("quantization_config", None)
    for key in ("torch_dtype", "dtype"):
        if dtype and key in config:
            config[key] = dtype
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _dtype_of(folder: Path) -> str | None:
    """The format that most of the weights are in."""
    kinds: list[str] = []
    for file in sorted(folder.glob("model*.safetensors")):
        kinds += [tensor.dtype for tensor in _header(file).tensors.values()]
    return _DTYPES.get(max(set(kinds), key=kinds.count)) if kinds else None


def _header(file: Path) -> SafetensorsHeader:
    with open(open_plain(file), "rb") as opened:
        return read_header(opened)


def _header_alone(file: Path, on_read: OnBytesRead | None) -> FileDigest:
    """Check that a weight file is as long as its header says. Reading all of it would take as long as writing
    it; evaluation has already shown that its values are finite."""
    size = file.stat().st_size
    return FileDigest("", size, header=_header(file) if file.name.endswith(".safetensors") else None)


def _digest(kind: SubmissionKind) -> DigestFile:
    """Nothing evaluates an image adapter before it is put in place: its numbers are read."""
    return _finite_weights if kind is SubmissionKind.IMAGE else _header_alone


def _finite_weights(file: Path, on_read: OnBytesRead | None) -> FileDigest:
    if file.name.endswith(".safetensors"):
        return check_weights(file)
    return _header_alone(file, on_read)


def _remove_others(folder: Path, kept: Set[str]) -> None:
    """Delete reference adapters, training arguments, checkpoints: everything in here would be uploaded."""
    for entry in list(folder.iterdir()):
        if any(Path(name).parts[0] == entry.name for name in kept):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            os.unlink(entry)
