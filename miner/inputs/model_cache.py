"""The shared cache of base models: plain directories per model and commit, with leases of jobs and locks.

    owner--name/COMMIT/...     a complete snapshot: every file has the hash that the hub names
    owner--name/COMMIT.json    its record; its modification time is when it was last used
    .partial/owner--name/      being fetched, or interrupted and resumed later
    .leases/JOB.json           which job needs which model; holds across restarts and for other processes
    .locks/                    of each model while fetched, of the cache while changed; vanish with the holder

The files are the only state, so daemon, workers and command line see the same. It is not the hub client's
layout: those snapshots are links into another directory, which a container would need as well.
"""

from __future__ import annotations

import contextlib
import fcntl
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

from core.domain.job_states import EndReason, StepFailed
from core.system.files import write_atomically
from miner.inputs.part_files import disk_full_as_step_failure, sync_folder


class ModelLeases:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def hold(self, job_id: int, model: str) -> None:
        path = self._path(job_id)
        if self._model(path) != model:
            with disk_full_as_step_failure(path):
                self._folder.mkdir(parents=True, exist_ok=True)
                write_atomically(path, json.dumps({"model": model}).encode())

    def release(self, job_id: int) -> None:
        self._path(job_id).unlink(missing_ok=True)

    def release_all_but(self, jobs: Collection[int]) -> None:
        """Release what jobs have left that ended without a release, as when the daemon was killed."""
        for job_id in {job_id for held in self.by_model().values() for job_id in held} - set(jobs):
            self.release(job_id)

    def by_model(self) -> dict[str, list[int]]:
        """Model → the jobs that hold it."""
        found: dict[str, list[int]] = {}
        for path in self._folder.glob("*.json") if self._folder.is_dir() else ():
            model = self._model(path)
            if path.stem.isdigit() and model:
                found.setdefault(model, []).append(int(path.stem))
        return {model: sorted(jobs) for model, jobs in sorted(found.items())}

    def _path(self, job_id: int) -> Path:
        return self._folder / f"{job_id}.json"

    @staticmethod
    def _model(path: Path) -> str | None:
        try:
            model = json.loads(path.read_bytes())["model"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return model if isinstance(model, str) else None


#: Interval for trying a taken lock again.
LOCK_RETRY_SECONDS = 0.2


@contextmanager
def locked(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock; while another process has it, `waiting` is called now and then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while not _try_lock(handle):
            if waiting is not None:
                waiting()
            time.sleep(LOCK_RETRY_SECONDS)
        yield
    finally:
        os.close(handle)


def is_unlocked(path: Path) -> bool:
    """Return True if nobody holds the lock at this moment."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        return _try_lock(handle)
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True)
class CachedModel:
    """A model in the cache, complete or (then without a commit) being fetched."""

    model: str
    commit: str | None
    path: Path
    bytes: int
    used_at: float
    #: Relative path → size, of all its files.
    files: dict[str, int]
    #: Details of the fetch.
    about: dict[str, Any]


class ModelCache:
    """`quota` limits the bytes of all snapshots; `keep_free` bytes of the disk stay free."""

    def __init__(self, folder: Path, quota: int, keep_free: int) -> None:
        self.folder = folder
        self.quota = quota
        self.keep_free = keep_free
        self.leases = ModelLeases(folder / ".leases")

    def snapshots(self) -> list[CachedModel]:
        """Complete models, the least recently used first."""
        records = self.folder.glob("*/*.json") if self.folder.is_dir() else ()
        found = [
            cached
            for record in records
            if not record.parent.name.startswith(".")
            if (cached := _read_snapshot(record))
        ]
        return sorted(found, key=lambda cached: (cached.used_at, cached.model))

    def unfinished(self) -> list[CachedModel]:
        """Partial models, interrupted or being fetched; their files may disappear at any moment."""
        found = []
        for path in self._partials.iterdir() if self._partials.is_dir() else ():
            try:
                state = path.stat()
            except FileNotFoundError:
                continue
            if S_ISDIR(state.st_mode):
                files, used = file_sizes(path), state.st_mtime
                found.append(
                    CachedModel(
                        _model_of_folder_name(path.name), None, path, sum(files.values()), used, files, {}
                    )
                )
        return sorted(found, key=lambda cached: (cached.used_at, cached.model))

    def find(self, model: str, commit: str | None = None) -> CachedModel | None:
        """The snapshot of a commit, or the newest one, if its files are complete; it is marked as used."""
        for cached in reversed(self.snapshots()):
            if cached.model == model and commit in (None, cached.commit):
                if _is_complete(cached):
                    os.utime(self._record(cached.model, cached.commit or ""))
                    return cached
                self._remove([cached])
        return None

    @contextmanager
    def fetching(self, model: str, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """Only one process at a time fetches a model; the others wait and find it in the cache."""
        with locked(self._lock(model), waiting):
            yield

    def partial(self, model: str, commit: str) -> Path:
        """The directory where a commit's files are collected; those of another commit are removed."""
        folder = self._partials / _folder_name(model)
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name != commit:
                shutil.rmtree(path)
        (folder / commit).mkdir(parents=True, exist_ok=True)
        return folder / commit

    def claim(self, model: str, wanted: int) -> None:
        """Reserve `wanted` bytes for the whole model, evicting others; `StepFailed` (DISK_FULL) at worst."""
        self.folder.mkdir(parents=True, exist_ok=True)
        claims = self._partials / f"{_folder_name(model)}.claim"
        with locked(self.folder / ".locks" / "cache"):
            present = sum(cached.bytes for cached in self.unfinished() if cached.model == model)
            claimed = self._claimed_by_others(model)
            while (short := self._short_of(max(wanted - present, 0) + claimed)) > 0:
                if not self._evict_one(sparing=model):
                    raise self._full(wanted, short)
            self._partials.mkdir(exist_ok=True)
            with disk_full_as_step_failure(claims):
                write_atomically(claims, str(wanted).encode())

    def commit(self, model: str, commit: str, about: dict[str, Any]) -> CachedModel:
        """Make the collected files a snapshot."""
        partial, target = self.partial(model, commit), self.folder / _folder_name(model) / commit
        files = file_sizes(partial)
        for name in files:
            (partial / name).chmod(0o644)  # containers run as another user
        for path in (partial, *filter(Path.is_dir, partial.rglob("*"))):
            path.chmod(0o755)
            sync_folder(path)
        record = {"model": model, "commit": commit, "fetched_at": time.time(), "files": files, "about": about}
        with locked(self.folder / ".locks" / "cache"), disk_full_as_step_failure(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                self._put_away(target)
                self._empty_trash()
            # The record first: alone it is ignored, but a directory without one would never be found.
            write_atomically(self._record(model, commit), json.dumps(record).encode(), mode=0o644)
            partial.rename(target)
            sync_folder(target.parent)
            shutil.rmtree(partial.parent, ignore_errors=True)
            (self._partials / f"{_folder_name(model)}.claim").unlink(missing_ok=True)
        snapshot = _read_snapshot(self._record(model, commit))
        assert snapshot is not None
        return snapshot

    def prune(
        self, to_bytes: int = 0, models: Collection[str] = (), dry_run: bool = False
    ) -> list[CachedModel]:
        """Remove unused models, least recently used first, until `to_bytes` are left; or only `models`."""
        with locked(self.folder / ".locks" / "cache"):
            free = [cached for cached in (*self.unfinished(), *self.snapshots()) if self._is_free(cached)]
            total = sum(cached.bytes for cached in (*self.unfinished(), *self.snapshots()))
            gone = []
            for cached in free:
                if cached.model in models if models else total > to_bytes:
                    total -= cached.bytes
                    gone.append(cached)
            if not dry_run:
                gone = [
                    cached for cached in gone if self._is_free(cached)
                ]  # a job may have started meanwhile
                self._remove(gone)
        return gone

    @property
    def _partials(self) -> Path:
        return self.folder / ".partial"

    @property
    def _trash(self) -> Path:
        return self.folder / ".trash"

    def _lock(self, model: str) -> Path:
        return self.folder / ".locks" / _folder_name(model)

    def _record(self, model: str, commit: str) -> Path:
        return self.folder / _folder_name(model) / f"{commit}.json"

    def _is_free(self, cached: CachedModel) -> bool:
        return cached.model not in self.leases.by_model() and is_unlocked(self._lock(cached.model))

    def _claimed_by_others(self, model: str) -> int:
        """Bytes that the models being fetched by others will still need."""
        total = 0
        for path in self._partials.glob("*.claim") if self._partials.is_dir() else ():
            other = _model_of_folder_name(path.stem)
            if other != model and not is_unlocked(self._lock(other)):
                present = sum(cached.bytes for cached in self.unfinished() if cached.model == other)
                total += max(int(path.read_text() or 0) - present, 0)
        return total

    def _short_of(self, wanted: int) -> int:
        used = sum(cached.bytes for cached in (*self.snapshots(), *self.unfinished()))
        free = shutil.disk_usage(self.folder).free
        return max(used + wanted - self.quota, self.keep_free + wanted - free)

    def _evict_one(self, sparing: str) -> bool:
        for cached in (*self.unfinished(), *self.snapshots()):
            if cached.model != sparing and self._is_free(cached):
                self._remove([cached])
                return True
        return False

    def _remove(self, gone: Collection[CachedModel]) -> None:
        """Move all aside before deleting any: that takes seconds, and no job must find one of them then."""
        for cached in gone:
            # The directory first: one without a record would stay for ever.
            self._put_away(cached.path)
            if cached.commit is not None:
                self._record(cached.model, cached.commit).unlink(missing_ok=True)
        self._empty_trash()

    def _put_away(self, path: Path) -> None:
        self._trash.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # removed by somebody else
            path.rename(self._trash / uuid.uuid4().hex)

    def _empty_trash(self) -> None:
        for path in self._trash.iterdir() if self._trash.is_dir() else ():  # also what a kill has left
            shutil.rmtree(path, ignore_errors=True)

    def _full(self, wanted: int, short: int) -> StepFailed:
        limits = f"MODEL_CACHE_BYTES={self.quota / 1e9:g}GB, MIN_FREE_DISK_BYTES={self.keep_free / 1e9:g}GB"
        return StepFailed(
            EndReason.DISK_FULL,
            f"the model takes {wanted / 1e9:.2f} GB, {short / 1e9:.2f} GB more than there is room for in "
            f"{self.folder} ({limits}); jobs need all other models there",
        )


def _folder_name(model: str) -> str:
    """The hub allows no '--' in names, so this can be reversed."""
    return model.replace("/", "--")


def _model_of_folder_name(key: str) -> str:
    return key.replace("--", "/", 1)


def file_sizes(folder: Path) -> dict[str, int]:
    """The bytes of all files by relative path; a file that disappears meanwhile is left out."""
    sizes = {}
    for directory, _, names in os.walk(folder):
        for name in names:
            path = Path(directory, name)
            with contextlib.suppress(FileNotFoundError):
                sizes[str(path.relative_to(folder))] = path.stat().st_size
    return sizes


def _read_snapshot(record: Path) -> CachedModel | None:
    try:
        content = json.loads(record.read_bytes())
        files = {str(name): int(size) for name, size in content["files"].items()}
        model, commit, about = str(content["model"]), str(content["commit"]), dict(content["about"])
        used = record.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not record.with_suffix("").is_dir():
        return None
    return CachedModel(model, commit, record.with_suffix(""), sum(files.values()), used, files, about)


def _is_complete(cached: CachedModel) -> bool:
    try:
        return all((cached.path / name).stat().st_size == size for name, size in cached.files.items())
    except OSError:
        return False
