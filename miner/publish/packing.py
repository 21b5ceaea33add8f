"""What is to be published, checked and fingerprinted: each file is read once, however often it is tried."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from core.files import write_atomically
from core.submission.check import Base, FileFact, Report, examine
from core.submission.documents import Item
from core.submission.faults import BadSubmission
from core.submission.folder import identity, open_plain
from core.submission.prepare import prepare
from core.submission.safetensors import read_header
from core.submission.weigh import Told, Weighed, weigh
from core.tasks import TaskType

_MEMORY_VERSION = 1
#: Of files that are told apart by git's own name on the hub; larger ones go by their SHA-256.
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Parcel:
    """Checked content, by published name."""

    items: dict[str, Item]
    report: Report
    notes: tuple[str, ...] = ()

    def size(self, name: str) -> int:
        return self.report.files[name].size

    def sha256(self, name: str) -> str:
        return self.report.files[name].sha256

    def with_items(self, items: dict[str, Item]) -> Parcel:
        """The same with other small content."""
        files = dict(self.report.files)
        for name, item in items.items():
            if isinstance(item, bytes):
                files[name] = FileFact(len(item), hashlib.sha256(item).hexdigest())
        return replace(self, items=items, report=replace(self.report, files=files))

    def git_name(self, name: str) -> str:
        """The name of git's blob: how the hub names a file that it keeps in the repository itself."""
        item = self.items[name]
        digest = hashlib.sha1(b"blob %d\0" % self.size(name), usedforsecurity=False)
        if isinstance(item, bytes):
            digest.update(item)
        else:
            with open(open_plain(item), "rb") as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
        return digest.hexdigest()


def pack(
    folder: Path,
    base: Base,
    task_type: TaskType | None,
    *,
    keep_card: bool = False,
    memory: Path | None = None,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> Parcel:
    """`BadSubmission` for what must not be published."""
    prepared = prepare(folder, base, task_type, keep_card=keep_card)
    known = Memory(memory)
    total = sum(_length(item) for item in prepared.items.values())
    done = 0

    def more(count: int) -> None:
        nonlocal done
        done += count
        told(min(done, total), total)

    report = examine(prepared.items, prepared.kind, base, told=more, weighed_by=known.weigh)
    if report.faults:
        raise BadSubmission(str(folder), report.faults)
    known.keep()
    notes = [f"mended: {fault}" for fault in prepared.mended]
    notes += [f"left out: {fault}" for fault in prepared.left_out]
    return Parcel(prepared.items, report, tuple(notes))


@dataclass
class Memory:
    """What was read of which file, by its identity: a second try need not read gigabytes again."""

    path: Path | None
    _known: dict[str, Any] = field(default_factory=dict)
    _used: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None:
            return
        try:
            found = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return
        if isinstance(found, dict) and found.get("version") == _MEMORY_VERSION:
            self._known = found["files"]

    def weigh(self, path: Path, told: Told | None) -> Weighed:
        with open(open_plain(path), "rb") as file:
            key = ":".join(map(str, identity(os.fstat(file.fileno()))))
            known = self._known.get(key)
            if known is not None:
                header = read_header(file) if path.name.endswith(".safetensors") else None
                found = Weighed(known["sha256"], known["size"], tuple(known["bad"]), known["count"], header)
                if told is not None:
                    told(found.size)
        if known is None:
            found = weigh(path, told)
        self._used[key] = {
            "sha256": found.sha256,
            "size": found.size,
            "bad": found.not_finite,
            "count": found.not_finite_count,
        }
        return found

    def keep(self) -> None:
        if self.path is not None and self._used != self._known:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = json.dumps({"version": _MEMORY_VERSION, "files": self._used}).encode()
            write_atomically(self.path, content, mode=0o644)


def _length(item: Item) -> int:
    return len(item) if isinstance(item, bytes) else item.lstat().st_size
