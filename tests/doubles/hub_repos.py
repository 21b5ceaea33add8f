"""The repositories of the hub stand-in: commits of files, large ones by their sha256."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

#: As the hub's default .gitattributes: what is stored beside the repository.
LARGE = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".zip", ".model")
_CLOCK = itertools.count()


@dataclass(frozen=True)
class Blob:
    content: bytes | Path
    large: bool

    @property
    def size(self) -> int:
        return self.content.stat().st_size if isinstance(self.content, Path) else len(self.content)

    @property
    def sha256(self) -> str:
        return _sha256(self.content)

    @property
    def oid(self) -> str:
        """Git's own name of the blob; of a large file's pointer, if it is large."""
        if self.large:
            return _git_oid(self.pointer())
        data = self.content.read_bytes() if isinstance(self.content, Path) else self.content
        return _git_oid(data)

    def pointer(self) -> bytes:
        lines = (
            "version https://git-lfs.github.com/spec/v1",
            f"oid sha256:{self.sha256}",
            f"size {self.size}",
        )
        return "".join(f"{line}\n" for line in lines).encode()

    @property
    def etag(self) -> str:
        return self.sha256 if self.large else self.oid


@dataclass(frozen=True)
class Commit:
    sha: str
    title: str
    at: str
    files: Mapping[str, Blob]


@dataclass
class Repo:
    id: str
    private: bool = False
    #: False, "auto" or "manual"; who may nevertheless read stands in `members`.
    gated: str | bool = False
    disabled: bool = False
    members: set[str] = field(default_factory=set)
    commits: list[Commit] = field(default_factory=list)

    @property
    def head(self) -> Commit:
        return self.commits[-1]

    def at(self, revision: str) -> Commit | None:
        if revision in ("main", "HEAD"):
            return self.head
        return next((commit for commit in self.commits if commit.sha == revision), None)

    def commit(
        self,
        files: Mapping[str, bytes | Path | Blob] | None = None,
        deleted: Iterable[str] = (),
        title: str = "Upload",
    ) -> Commit:
        """The next state of main: what was there, without `deleted`, with `files`."""
        gone = set(deleted)
        kept = {} if not self.commits else {k: v for k, v in self.head.files.items() if k not in gone}
        for path, content in (files or {}).items():
            kept[path] = content if isinstance(content, Blob) else Blob(content, path.endswith(LARGE))
        number = next(_CLOCK)
        sha = hashlib.sha1(f"{self.id} {number} {sorted(kept)}".encode(), usedforsecurity=False).hexdigest()
        at = f"2026-01-01T{number // 3600 % 24:02}:{number // 60 % 60:02}:{number % 60:02}.000Z"
        self.commits.append(Commit(sha, title, at, dict(sorted(kept.items()))))
        return self.head


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


_KNOWN: dict[tuple[str, int, int], str] = {}


def _sha256(content: bytes | Path) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    stat = content.stat()
    key = (str(content), stat.st_size, stat.st_mtime_ns)
    if key not in _KNOWN:
        with content.open("rb") as file:
            _KNOWN[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return _KNOWN[key]
