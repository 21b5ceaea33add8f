"""Check and fingerprint a submission before it is published; each file is read once across retries."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from core.domain.tasks import TaskType
from core.submission.check import BaseModelRef, FileFact, SubmissionReport, examine
from core.submission.digests import FileDigest, OnBytesRead, digest_file
from core.submission.faults import BadSubmission
from core.submission.folder import SubmissionItem, file_identity, open_plain
from core.submission.prepare import prepare
from core.submission.safetensors import read_header
from core.system.files import write_atomically

_MEMORY_VERSION = 1
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class PackedSubmission:
    """The checked files of a submission, by their published names."""

    items: dict[str, SubmissionItem]
    report: SubmissionReport
    notes: tuple[str, ...] = ()

    def size(self, name: str) -> int:
        return self.report.files[name].size

    def sha256(self, name: str) -> str:
        return self.report.files[name].sha256

    def with_items(self, items: dict[str, SubmissionItem]) -> PackedSubmission:
        """The same submission with other small files."""
        files = dict(self.report.files)
        for name, item in items.items():
            if isinstance(item, bytes):
                files[name] = FileFact(len(item), hashlib.sha256(item).hexdigest())
        return replace(self, items=items, report=replace(self.report, files=files))

    def git_blob_hash(self, name: str) -> str:
        """Git's hash of the blob, which the hub has for a file that is stored in the repository itself."""
        item = self.items[name]
        digest = hashlib.sha1(b"blob %d\0" % self.size(name), usedforsecurity=False)
        if isinstance(item, bytes):
            digest.update(item)
        else:
            with open(open_plain(item), "rb") as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
        return digest.hexdigest()


def pack_submission(
    folder: Path,
    base: BaseModelRef,
    task_type: TaskType | None,
    *,
    keep_card: bool = False,
    memory: Path | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> PackedSubmission:
    """Check a submission and compute its hashes; `BadSubmission` if it must not be published."""
    prepared = prepare(folder, base, task_type, keep_card=keep_card)
    known = FingerprintCache(memory)
    total = sum(_length(item) for item in prepared.items.values())
    done = 0

    def on_read(count: int) -> None:
        nonlocal done
        done += count
        on_progress(min(done, total), total)

    report = examine(prepared.items, prepared.kind, base, on_read=on_read, digest=known.digest_of)
    if report.faults:
        raise BadSubmission(str(folder), report.faults)
    known.keep()
    notes = [f"mended: {fault}" for fault in prepared.mended]
    notes += [f"left out: {fault}" for fault in prepared.left_out]
    notes += [f"remark: {fault}" for fault in report.remarks]
    return PackedSubmission(prepared.items, report, tuple(notes))


@dataclass
class FingerprintCache:
    """The digests of files by their identity, so that a second try does not read gigabytes again."""

    path: Path | None
    _known: dict[str, Any] = field(default_factory=dict)
    _used: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None:
            return
        try:
            content = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return
        if isinstance(content, dict) and content.get("version") == _MEMORY_VERSION:
            self._known = content["files"]

    def digest_of(self, path: Path, on_read: OnBytesRead | None) -> FileDigest:
        with open(open_plain(path), "rb") as file:
            key = ":".join(map(str, file_identity(os.fstat(file.fileno()))))
            known = self._known.get(key)
            if known is not None:
                header = read_header(file) if path.name.endswith(".safetensors") else None
                digest = FileDigest(
                    known["sha256"], known["size"], tuple(known["bad"]), known["count"], header
                )
                if on_read is not None:
                    on_read(digest.size)
        if known is None:
            digest = digest_file(path, on_read)
        self._used[key] = {
            "sha256": digest.sha256,
            "size": digest.size,
            "bad": digest.not_finite,
            "count": digest.not_finite_count,
        }
        return digest

    def keep(self) -> None:
        if self.path is not None and self._used != self._known:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = json.dumps({"version": _MEMORY_VERSION, "files": self._used}).encode()
            write_atomically(self.path, content, mode=0o644)


def _length(item: SubmissionItem) -> int:
    return len(item) if isinstance(item, bytes) else item.lstat().st_size
