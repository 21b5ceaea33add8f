"""HUB=local: a folder in the hub's place, with the same check and the same fingerprint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from core.submission.folder import open_plain
from core.submission.place import put_in_place, settle
from core.submission.weigh import weigh
from miner.publish.packing import Parcel
from miner.publish.words import HubTrouble, Published, Trouble

#: Whose repositories these are when nobody says.
DEFAULT_USER = "local"


class LocalHub:
    def __init__(self, folder: Path, user: str | None) -> None:
        self.folder = folder
        self.user = user or DEFAULT_USER

    def publish(self, repo_name: str, parcel: Parcel) -> Published:
        repo = f"{self.user}/{repo_name}"
        place = self.folder / repo
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(f".{place.name}.tmp")
        shutil.rmtree(partial, ignore_errors=True)
        for name, item in parcel.items.items():
            target = partial / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(item, bytes):
                target.write_bytes(item)
            else:
                _copy(item, target)
            _verify(target, parcel.sha256(name))
        put_in_place(partial, place)
        report = parcel.report
        return Published(
            repo=repo,
            model_hash=report.model_hash,
            files=len(report.files),
            size=report.size,
            sent=report.size,
        )

    def move(self, earlier: str, repo_name: str) -> Published:
        repo = f"{self.user}/{repo_name}"
        old, new = self.folder / earlier, self.folder / repo
        settle(old)
        if not settle(new):
            if not old.is_dir():
                raise HubTrouble(Trouble.GONE, f"{earlier} is not in {self.folder} (any more)")
            new.parent.mkdir(parents=True, exist_ok=True)
            os.rename(old, new)
        return Published(repo=repo, model_hash=None)


def _copy(source: Path, target: Path) -> None:
    """A copy and not a link: what is published must not change when its source does."""
    with open(open_plain(source), "rb") as read, target.open("xb") as made:
        shutil.copyfileobj(read, made, 4 << 20)


def _verify(target: Path, sha256: str) -> None:
    found = weigh(target, plain=True)
    if found.sha256 != sha256:
        text = (
            f"{target} has the SHA-256 {found.sha256}, but {sha256} was checked: it was written to meanwhile"
        )
        raise HubTrouble(Trouble.MISMATCH, text)
