"""Whether a submission is worth publishing: what evaluators would hold against it, found before they do."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.submission import adapters, card, configs, weights
from core.submission.documents import Item, json_object
from core.submission.faults import Fault, FaultKind
from core.submission.model_hash import model_hash
from core.submission.safetensors import MAX_HEADER, BadHeader, Header
from core.submission.selection import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CARD,
    CONFIG,
    IMAGE_WEIGHTS,
    INDEX,
    SubmissionKind,
)
from core.submission.weigh import Told, Weighed, weigh

#: More than the largest model that is trained here, in full precision.
MAX_BYTES = 400 * 10**9
#: Of all files together: each of many parts may have a large one, and all of them are held in memory.
MAX_HEADERS = 4 * MAX_HEADER

Weigh = Callable[[Path, Told | None], Weighed]


@dataclass(frozen=True, slots=True)
class Base:
    """The model that was trained: the hub's name, and the folder it lies in, as far as they are known."""

    model_id: str | None = None
    folder: Path | None = None

    def config(self) -> dict[str, Any] | None:
        if self.folder is None or not (self.folder / CONFIG).is_file():
            return None
        try:
            # Caches of the hub keep links.
            found = json_object(CONFIG, (self.folder / CONFIG).resolve())
        except OSError:
            return None
        return None if isinstance(found, Fault) else found


@dataclass(frozen=True, slots=True)
class FileFact:
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Report:
    """What was found. Without faults it may be published; with any, there is no hash to promise."""

    kind: SubmissionKind
    #: By the names they are published under.
    files: dict[str, FileFact]
    faults: tuple[Fault, ...]
    model_hash: str | None
    parameters: int = 0
    headers: dict[str, Header] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        return sum(fact.size for fact in self.files.values())


def examine(
    items: Mapping[str, Item],
    kind: SubmissionKind,
    base: Base | None = None,
    *,
    told: Told | None = None,
    weighed_by: Weigh = weigh,
) -> Report:
    """Look at everything that is to be published, each file once. Nothing here raises for what is in them."""
    base = base or Base()
    faults = list(_missing(items, kind))
    sizes = {name: _size(item) for name, item in items.items()}
    if sum(sizes.values()) > MAX_BYTES:
        rule = "is more than any model needs; look for what wrote it"
        faults.append(Fault(FaultKind.TOO_MUCH, "the folder", f"{sum(sizes.values()):,} bytes", rule))
        return Report(kind, {}, tuple(faults), None)
    files: dict[str, FileFact] = {}
    found: dict[str, Weighed] = {}
    described = 0
    for name, item in sorted(items.items()):
        try:
            seen = _weighed(name, item, told, weighed_by)
        except BadHeader as error:
            faults.append(Fault(FaultKind.BAD_HEADER, name, "", str(error)))
        except OSError as error:
            why = f"can't be read: {error.strerror or error}"
            faults.append(Fault(FaultKind.UNREADABLE, name, "", why))
        else:
            files[name] = FileFact(seen.size, seen.sha256)
            if seen.header is not None:
                found[name] = seen
                described += seen.header.data_at
        if described > MAX_HEADERS:
            rule = "describe more tensors than any model has; save it again"
            faults.append(Fault(FaultKind.TOO_MUCH, "the headers of all parts", f"{described:,} bytes", rule))
            return Report(kind, {}, tuple(faults), None)
    faults += _said(items, kind, base)
    faults += _held(items, kind, base, found)
    headers = {name: seen.header for name, seen in found.items() if seen.header is not None}
    count = sum(tensor.count for header in headers.values() for tensor in header.tensors.values())
    whole = {} if faults else {name: (fact.size, fact.sha256) for name, fact in files.items()}
    return Report(kind, files, tuple(faults), model_hash(whole), count, headers)


def _missing(items: Mapping[str, Item], kind: SubmissionKind) -> Iterator[Fault]:
    needed = {
        SubmissionKind.ADAPTER: (ADAPTER_CONFIG, ADAPTER_WEIGHTS),
        SubmissionKind.FULL: (CONFIG,),
        SubmissionKind.IMAGE: (IMAGE_WEIGHTS,),
    }[kind]
    for name in needed:
        if name not in items:
            yield Fault(FaultKind.MISSING, name, "", f"is missing: without it there is no {kind} submission")
    if kind is SubmissionKind.FULL:
        yield from weights.shards(items.keys(), items.get(INDEX))


def _said(items: Mapping[str, Item], kind: SubmissionKind, base: Base) -> Iterator[Fault]:
    """What the small files say."""
    if kind is SubmissionKind.ADAPTER and ADAPTER_CONFIG in items:
        said = json_object(ADAPTER_CONFIG, items[ADAPTER_CONFIG])
        yield from [said] if isinstance(said, Fault) else adapters.faults(said, base.model_id)
    if kind is SubmissionKind.FULL and CONFIG in items:
        said = json_object(CONFIG, items[CONFIG])
        wanted = base.config()
        if isinstance(said, Fault):
            yield said
        elif wanted is not None:
            yield from configs.differences(said, wanted)
    if CARD in items and (wrong := card.fault_of(items[CARD], base.model_id)):
        yield wrong


def _held(
    items: Mapping[str, Item], kind: SubmissionKind, base: Base, found: Mapping[str, Weighed]
) -> Iterator[Fault]:
    """What the weights hold."""
    rows = _rows(items, kind, base)
    for name, seen in found.items():
        assert seen.header is not None
        bad = (seen.not_finite_count, seen.not_finite)
        yield from weights.contents(name, seen.header, kind, rows, bad)
    if kind is SubmissionKind.FULL and INDEX in items and any(name != INDEX for name in found):
        headers = {name: seen.header for name, seen in found.items() if seen.header is not None}
        yield from weights.indexed(items.keys(), headers, items[INDEX])


def _rows(items: Mapping[str, Item], kind: SubmissionKind, base: Base) -> int | None:
    config = base.config()
    if config is None and kind is SubmissionKind.FULL and CONFIG in items:
        own = json_object(CONFIG, items[CONFIG])
        config = None if isinstance(own, Fault) else own
    return None if config is None else configs.vocabulary(config)


def _size(item: Item) -> int:
    if isinstance(item, bytes):
        return len(item)
    try:
        return item.lstat().st_size
    except OSError:
        return 0


def _weighed(name: str, item: Item, told: Told | None, weighed_by: Weigh) -> Weighed:
    if isinstance(item, Path):
        return weighed_by(item, told)
    return Weighed(hashlib.sha256(item).hexdigest(), len(item))
