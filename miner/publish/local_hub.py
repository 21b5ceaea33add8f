"""HUB=local: a directory instead of the hub, with the same checks and the same fingerprint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from core.submission.digests import digest_file
from core.submission.folder import open_plain
from core.submission.swap import put_in_place, recover_swap
from miner.publish.messages import HubTrouble, PublishedRepo, PublishTrouble
from miner.publish.packing import PackedSubmission

#: The owner of the repositories if none is set.
DEFAULT_USER = "local"


class LocalHub:
    def __init__(self, folder: Path, user: str | None) -> None:
        self.folder = folder
        self.user = user or DEFAULT_USER

    def publish(self, repo_name: str, packed: PackedSubmission) -> PublishedRepo:
        repo = f"{self.user}/{repo_name}"
        path = self.folder / repo
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.tmp")
        shutil.rmtree(partial, ignore_errors=True)
        for name, item in packed.items.items():
            target = partial / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(item, bytes):
                target.write_bytes(item)
            else:
                _copy_file(item, target)
            _verify_copy(target, packed.sha256(name))
        put_in_place(partial, path)
        report = packed.report
        return PublishedRepo(
            repo=repo,
            model_hash=report.model_hash,
            files=len(report.files),
            size=report.size,
            sent=report.size,
        )

    def move(self, earlier: str, repo_name: str) -> PublishedRepo:
        repo = f"{self.user}/{repo_name}"
        old, new = self.folder / earlier, self.folder / repo
        recover_swap(old)
        if not recover_swap(new):
            if not old.is_dir():
                raise HubTrouble(PublishTrouble.GONE, f"{earlier} is not in {self.folder} (any more)")
            new.parent.mkdir(parents=True, exist_ok=True)
            os.rename(old, new)
        return PublishedRepo(repo=repo, model_hash=None)


def _copy_file(source: Path, target: Path) -> None:
    """A copy and not a link: what is published must not change when its source does."""
    with open(open_plain(source), "rb") as reader, target.open("xb") as writer:
        shutil.copyfileobj(reader, writer, 4 << 20)


def _verify_copy(target: Path, sha256: str) -> None:
    written = digest_file(target, plain=True).sha256
    if written != sha256:
        text = f"{target} has the SHA-256 {written}, but {sha256} was checked: it was changed meanwhile"
        raise HubTrouble(PublishTrouble.MISMATCH, text)
