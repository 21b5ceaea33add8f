"""Prepare what is published of a folder that an engine wrote: selected, mended and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from core.domain.tasks import TaskType
from core.submission import metadata
from core.submission.check import BaseModelRef, SubmissionReport, examine
from core.submission.digests import counts_for_hash, digest_file, model_hash
from core.submission.faults import Fault, FaultKind
from core.submission.folder import (
    ADAPTER_CONFIG,
    CARD,
    CONFIG,
    FileSelection,
    SubmissionItem,
    SubmissionKind,
    json_object,
    kind_of,
    list_folder,
    select_files,
    to_json,
)
from core.system.files import write_atomically


@dataclass(frozen=True, slots=True)
class PreparedSubmission:
    kind: SubmissionKind
    #: By published name: a file of the folder, or new content in its place.
    items: dict[str, SubmissionItem]
    #: The files with new content, each with the reason.
    mended: tuple[Fault, ...]
    #: Files that are not published, each with the reason.
    left_out: tuple[Fault, ...]


def prepare(
    folder: Path, base: BaseModelRef, task_type: TaskType | None = None, *, keep_card: bool = False
) -> PreparedSubmission:
    """Select and mend what is published; `folder` itself is not changed. `BadSubmission` if it is not one."""
    listing = list_folder(folder)
    selection = select_files(listing.names(), kind_of(listing.names(), task_type))
    items: dict[str, SubmissionItem] = {name: folder / path for name, path in selection.files.items()}
    mended = _mended(items, selection, base, keep_card=keep_card)
    items.update({name: content for name, (content, _) in mended.items()})
    reasons = tuple(reason for _, reason in mended.values())
    return PreparedSubmission(selection.kind, items, reasons, (*listing.faults, *selection.left_out))


def mend_in_place(folder: Path, base: BaseModelRef, task_type: TaskType | None = None) -> PreparedSubmission:
    """Prepare a folder of our own, and write the mended files into it."""
    prepared = prepare(folder, base, task_type)
    for name, item in prepared.items.items():
        if isinstance(item, bytes):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / name, item, mode=0o644)
    return prepared


def _mended(
    items: Mapping[str, SubmissionItem], selection: FileSelection, base: BaseModelRef, *, keep_card: bool
) -> dict[str, tuple[bytes, Fault]]:
    """By name: the new content, and the reason."""
    mended: dict[str, tuple[bytes, Fault]] = {}
    if base.model_id is None:
        return mended
    if selection.kind is SubmissionKind.ADAPTER and ADAPTER_CONFIG in items:
        mended |= _mended_adapter(items[ADAPTER_CONFIG], base.model_id)
    if selection.kind is SubmissionKind.FULL and CONFIG in items:
        mended |= _mended_config(items[CONFIG], base)
    good = CARD in items and metadata.card_fault(items[CARD], base.model_id) is None
    if not (keep_card and good):
        licence = metadata.licence_of(base.folder) if base.folder is not None and base.folder.is_dir() else {}
        rule = "is replaced: engines write local folders and settings into it"
        fault = Fault(FaultKind.BAD_CARD, CARD, "", rule)
        mended[CARD] = (metadata.model_card(selection.kind, base.model_id, licence), fault)
    return mended


def _mended_adapter(item: SubmissionItem, model_id: str) -> dict[str, tuple[bytes, Fault]]:
    config = json_object(ADAPTER_CONFIG, item)
    if isinstance(config, Fault):
        return {}
    mended = metadata.mended_adapter_config(config, model_id)
    fault = Fault(FaultKind.WRONG_BASE, ADAPTER_CONFIG, "", f"now names {model_id} as its base")
    return {ADAPTER_CONFIG: (to_json(mended), fault)} if mended != config else {}


def _mended_config(item: SubmissionItem, base: BaseModelRef) -> dict[str, tuple[bytes, Fault]]:
    config, wanted = json_object(CONFIG, item), base.config()
    if isinstance(config, Fault) or wanted is None:
        return {}
    mended = metadata.restored_config(config, wanted)
    if mended == config:
        return {}
    keys = ", ".join(sorted(key for key in mended if mended[key] != config.get(key, ...)))
    rule = f"has the base model's keys again, which older readers need: {keys}"
    return {CONFIG: (to_json(mended), Fault(FaultKind.CONFIG_CHANGED, CONFIG, "", rule))}


@dataclass(frozen=True, slots=True)
class CheckedSubmission:
    prepared: PreparedSubmission
    report: SubmissionReport
    faults: tuple[Fault, ...]


def check_submission(
    folder: Path,
    base: BaseModelRef,
    task_type: TaskType | None = None,
    *,
    as_is: bool = False,
    keep_card: bool = False,
) -> CheckedSubmission:
    """Check whether `folder` can be published. With `as_is` nothing is mended or left out first: a
    tournament's uploader takes everything in the folder. `BadSubmission` if it is not a folder."""
    prepared = prepare(folder, BaseModelRef() if as_is else base, task_type, keep_card=keep_card)
    report = examine(prepared.items, prepared.kind, base)
    strays = prepared.left_out if as_is else ()
    return CheckedSubmission(prepared, report, (*report.faults, *strays))


def folder_model_hash(folder: Path) -> str | None:
    """The model hash that a validator takes of these files."""
    files = {}
    for entry in list_folder(folder).files:
        if counts_for_hash(entry.path) and entry.size:
            digest = digest_file(folder / entry.path, plain=True)
            files[entry.path] = (digest.size, digest.sha256)
    return model_hash(files)
