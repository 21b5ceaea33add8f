"""From a folder that an engine left to what is published of it: chosen, and mended where that is safe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from core.files import write_atomically
from core.submission import adapters, card, configs
from core.submission.check import Base
from core.submission.documents import Item, json_object, to_json
from core.submission.faults import Fault, FaultKind
from core.submission.folder import listing
from core.submission.selection import (
    ADAPTER_CONFIG,
    CARD,
    CONFIG,
    Selection,
    SubmissionKind,
    kind_of,
    select,
)
from core.tasks import TaskType


@dataclass(frozen=True, slots=True)
class Prepared:
    kind: SubmissionKind
    #: By published name: a file of the folder, or new content in its place.
    items: dict[str, Item]
    #: What was given new content, each with the reason.
    mended: tuple[Fault, ...]
    #: What is not published, each with the reason.
    left_out: tuple[Fault, ...]


def prepare(
    folder: Path, base: Base, task_type: TaskType | None = None, *, keep_card: bool = False
) -> Prepared:
    """What of `folder` is to be published; nothing in it is changed. `BadSubmission` for what is none."""
    seen = listing(folder)
    chosen = select(seen.names(), kind_of(seen.names(), task_type))
    items: dict[str, Item] = {name: folder / path for name, path in chosen.files.items()}
    changed = _mended(items, chosen, base, keep_card=keep_card)
    why = {name: reason for name, (_, reason) in changed.items()}
    items.update({name: content for name, (content, _) in changed.items()})
    return Prepared(chosen.kind, items, tuple(why.values()), (*seen.odd, *chosen.left_out))


def mend_in_place(folder: Path, base: Base, task_type: TaskType | None = None) -> Prepared:
    """For who made the folder: write what was mended into it, and say what else lies there."""
    prepared = prepare(folder, base, task_type)
    for name, item in prepared.items.items():
        if isinstance(item, bytes):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / name, item, mode=0o644)
    return prepared


def _mended(
    items: Mapping[str, Item], chosen: Selection, base: Base, *, keep_card: bool
) -> dict[str, tuple[bytes, Fault]]:
    found: dict[str, tuple[bytes, Fault]] = {}
    if base.model_id is None:
        return found
    if chosen.kind is SubmissionKind.ADAPTER and ADAPTER_CONFIG in items:
        _adapter(items[ADAPTER_CONFIG], base.model_id, found)
    if chosen.kind is SubmissionKind.FULL and CONFIG in items:
        _config(items[CONFIG], base, found)
    good = CARD in items and card.fault_of(items[CARD], base.model_id) is None
    if not (keep_card and good):
        licence = card.licence_of(base.folder) if base.folder is not None and base.folder.is_dir() else {}
        rule = "is written anew: engines put local folders and settings into it"
        fault = Fault(FaultKind.BAD_CARD, CARD, "", rule)
        found[CARD] = (card.card(chosen.kind, base.model_id, licence), fault)
    return found


def _adapter(item: Item, model_id: str, found: dict[str, tuple[bytes, Fault]]) -> None:
    said = json_object(ADAPTER_CONFIG, item)
    if isinstance(said, Fault):
        return
    mended = adapters.mended(said, model_id)
    if mended != said:
        fault = Fault(FaultKind.WRONG_BASE, ADAPTER_CONFIG, "", f"now names {model_id} as its base")
        found[ADAPTER_CONFIG] = (to_json(mended), fault)


def _config(item: Item, base: Base, found: dict[str, tuple[bytes, Fault]]) -> None:
    said, wanted = json_object(CONFIG, item), base.config()
    if isinstance(said, Fault) or wanted is None:
        return
    mended = configs.restored(said, wanted)
    if mended != said:
        keys = ", ".join(sorted(key for key in mended if mended[key] != said.get(key, ...)))
        rule = f"has again what the base model's says and older readers need: {keys}"
        found[CONFIG] = (to_json(mended), Fault(FaultKind.CONFIG_CHANGED, CONFIG, "", rule))
