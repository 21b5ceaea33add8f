"""The shared cache of base models: plain folders, one per model and commit, that training reads as they are.

    owner--name/COMMIT/…       a snapshot, complete: every file has the hash that the hub names
    owner--name/COMMIT.json    its record; how recently it was used is its time of change
    .partial/owner--name/      what is being fetched, or broke off and will be resumed
    .leases/JOB.json           which job needs which model
    .locks/                    of each model while it is fetched, and of the cache while it is changed

The files are the only state, so the daemon, its workers and the command line see the same. Not the hub
client's own layout: its snapshots are links into another folder, which a container would need as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR
from typing import Any

from core.files import write_atomically
from miner.jobs.inputs.leases import Leases
from miner.jobs.inputs.locks import is_free, locked
from miner.jobs.inputs.parts import no_room_is_told, sync_folder
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason


@dataclass(frozen=True)
class Snapshot:
    """A model in the cache, whole or (then without a commit) on its way."""

    model: str
    commit: str | None
    path: Path
    bytes: int
    used_at: float
    #: Relative path → size, of all its files.
    files: dict[str, int]
    #: What there is to know of how it was fetched.
    about: dict[str, Any]


class ModelCache:
    """`quota` and `keep_free` are bytes: of all snapshots, and of the disk."""

    def __init__(self, folder: Path, quota: int, keep_free: int) -> None:
        self.folder = folder
        self.quota = quota
        self.keep_free = keep_free
        self.leases = Leases(folder / ".leases")

    def snapshots(self) -> list[Snapshot]:
        """Complete ones, the least recently used first."""
        records = self.folder.glob("*/*.json") if self.folder.is_dir() else ()
        found = [
            one for record in records if not record.parent.name.startswith(".") if (one := _read(record))
        ]
        return sorted(found, key=lambda one: (one.used_at, one.model))

    def unfinished(self) -> list[Snapshot]:
        """Broken off or under way: then files, and the folder itself, may go while one looks."""
        found = []
        for path in self._partials.iterdir() if self._partials.is_dir() else ():
            try:
                state = path.stat()
            except FileNotFoundError:
                continue
            if S_ISDIR(state.st_mode):
                files, used = sizes(path), state.st_mtime
                found.append(Snapshot(_model_of(path.name), None, path, sum(files.values()), used, files, {}))
        return sorted(found, key=lambda one: (one.used_at, one.model))

    def find(self, model: str, commit: str | None = None) -> Snapshot | None:
        """The snapshot of a commit, or the newest; whole to all appearances, and marked as used."""
        for one in reversed(self.snapshots()):
            if one.model == model and commit in (None, one.commit):
                if _is_whole(one):
                    os.utime(self._record(one.model, one.commit or ""))
                    return one
                self._remove([one])
        return None

    @contextmanager
    def fetching(self, model: str, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """Only one at a time fetches a model; the others wait, and find it there."""
        with locked(self._lock(model), waiting):
            yield

    def partial(self, model: str, commit: str) -> Path:
        """Where the files of a commit are put together. What was begun of another commit is given up."""
        folder = self._partials / _key(model)
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name != commit:
                shutil.rmtree(path)
        (folder / commit).mkdir(parents=True, exist_ok=True)
        return folder / commit

    def claim(self, model: str, wanted: int) -> None:
        """Make room for `wanted` bytes of a model in all; `StepFailed` (DISK_FULL) when there is none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        claims = self._partials / f"{_key(model)}.claim"
        with locked(self.folder / ".locks" / "cache"):
            there = sum(one.bytes for one in self.unfinished() if one.model == model)
            promised = self._promised(model)
            while (short := self._short_of(max(wanted - there, 0) + promised)) > 0:
                if not self._evict_one(sparing=model):
                    raise self._full(wanted, short)
            self._partials.mkdir(exist_ok=True)
            with no_room_is_told(claims):
                write_atomically(claims, str(wanted).encode())

    def commit(self, model: str, commit: str, about: dict[str, Any]) -> Snapshot:
        """What was put together is whole: from now on it is a snapshot."""
        partial, target = self.partial(model, commit), self.folder / _key(model) / commit
        files = sizes(partial)
        for name in files:
            (partial / name).chmod(0o644)  # a container's user is another than ours
        for path in (partial, *filter(Path.is_dir, partial.rglob("*"))):
            path.chmod(0o755)
            sync_folder(path)
        record = {"model": model, "commit": commit, "fetched_at": time.time(), "files": files, "about": about}
        with locked(self.folder / ".locks" / "cache"), no_room_is_told(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                self._put_away(target)
                self._empty_trash()
            # The record first: without its folder it counts for nothing, a folder without one is never found.
            write_atomically(self._record(model, commit), json.dumps(record).encode(), mode=0o644)
            partial.rename(target)
            sync_folder(target.parent)
            shutil.rmtree(partial.parent, ignore_errors=True)
            (self._partials / f"{_key(model)}.claim").unlink(missing_ok=True)
        made = _read(self._record(model, commit))
        assert made is not None
        return made

    def prune(self, to_bytes: int = 0, models: Collection[str] = (), dry_run: bool = False) -> list[Snapshot]:
        """Remove what no job needs, least recently used first, until `to_bytes` are left; or these models."""
        with locked(self.folder / ".locks" / "cache"):
            free = [one for one in (*self.unfinished(), *self.snapshots()) if self._is_free(one)]
            total = sum(one.bytes for one in (*self.unfinished(), *self.snapshots()))
            gone = []
            for one in free:
                if one.model in models if models else total > to_bytes:
                    total -= one.bytes
                    gone.append(one)
            if not dry_run:
                gone = [one for one in gone if self._is_free(one)]  # a job may have come meanwhile
                self._remove(gone)
        return gone

    @property
    def _partials(self) -> Path:
        return self.folder / ".partial"

    @property
    def _trash(self) -> Path:
        return self.folder / ".trash"

    def _lock(self, model: str) -> Path:
        return self.folder / ".locks" / _key(model)

    def _record(self, model: str, commit: str) -> Path:
        return self.folder / _key(model) / f"{commit}.json"

    def _is_free(self, one: Snapshot) -> bool:
        return one.model not in self.leases.by_model() and is_free(self._lock(one.model))

    def _promised(self, model: str) -> int:
        """Bytes that others, who are fetching now, will still need."""
        total = 0
        for path in self._partials.glob("*.claim") if self._partials.is_dir() else ():
            other = _model_of(path.stem)
            if other != model and not is_free(self._lock(other)):
                there = sum(one.bytes for one in self.unfinished() if one.model == other)
                total += max(int(path.read_text() or 0) - there, 0)
        return total

    def _short_of(self, wanted: int) -> int:
        used = sum(one.bytes for one in (*self.snapshots(), *self.unfinished()))
        free = shutil.disk_usage(self.folder).free
        return max(used + wanted - self.quota, self.keep_free + wanted - free)

    def _evict_one(self, sparing: str) -> bool:
        for one in (*self.unfinished(), *self.snapshots()):
            if one.model != sparing and self._is_free(one):
                self._remove([one])
                return True
        return False

    def _remove(self, gone: Collection[Snapshot]) -> None:
        """All are out of the way before any is taken apart: that takes seconds, in which a job must not find
        one that is still to go."""
        for one in gone:
            # The folder first: one without a record would lie there for ever, and count for nothing.
            self._put_away(one.path)
            if one.commit is not None:
                self._record(one.model, one.commit).unlink(missing_ok=True)
        self._empty_trash()

    def _put_away(self, path: Path) -> None:
        self._trash.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # gone already, or another was faster
            path.rename(self._trash / uuid.uuid4().hex)

    def _empty_trash(self) -> None:
        for left in self._trash.iterdir() if self._trash.is_dir() else ():  # also what a kill left here
            shutil.rmtree(left, ignore_errors=True)

    def _full(self, wanted: int, short: int) -> StepFailed:
        limits = f"MODEL_CACHE_BYTES={self.quota / 1e9:g}GB, MIN_FREE_DISK_BYTES={self.keep_free / 1e9:g}GB"
        return StepFailed(
            EndReason.DISK_FULL,
            f"the model takes {wanted / 1e9:.2f} GB, {short / 1e9:.2f} GB more than there is room for in "
            f"{self.folder} ({limits}); what else lies there is needed by jobs",
        )


def _key(model: str) -> str:
    """The hub allows no '--' in names, so this can be read back."""
    return model.replace("/", "--")


def _model_of(key: str) -> str:
    return key.replace("--", "/", 1)


def sizes(folder: Path) -> dict[str, int]:
    """Relative path → bytes, of the files in a folder that another may be at work in: what goes while one
    looks, as a part that gets its name, is not there."""
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            with contextlib.suppress(FileNotFoundError):
                found[str(path.relative_to(folder))] = path.stat().st_size
    return found


def _read(record: Path) -> Snapshot | None:
    try:
        found = json.loads(record.read_bytes())
        files = {str(name): int(size) for name, size in found["files"].items()}
        model, commit, about = str(found["model"]), str(found["commit"]), dict(found["about"])
        used = record.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not record.with_suffix("").is_dir():
        return None
    return Snapshot(model, commit, record.with_suffix(""), sum(files.values()), used, files, about)


def _is_whole(one: Snapshot) -> bool:
    try:
        return all((one.path / name).stat().st_size == size for name, size in one.files.items())
    except OSError:
        return False
