"""Put a submission in place in one step, and take a snapshot of it while a better one may arrive.

The trainer writes beside the place and swaps; the publisher takes hard links. Both are here because each
relies on the other: the place never holds half a submission, and a snapshot never mixes two.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from pathlib import Path

from core.submission.faults import BadSubmission, Fault, FaultKind
from core.submission.folder import FileIdentity, FolderEntry, file_identity, list_folder, open_plain

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
#: A swap takes milliseconds, so a snapshot that met one is simply taken again.
TRIES = 20


def put_in_place(new: Path, place: Path) -> None:
    """Replace the folder at `place` by the complete folder `new`, in one step where the file system can
    (Linux: all usual ones); the old one is removed afterwards. Both are on one file system."""
    _make_readable(new)
    _flush(new)
    _swap(new, place)


def recover_swap(place: Path) -> bool:
    """After a crash: restore a submission that a swap in two steps had just moved away; return whether there
    is one at `place`."""
    old = place.with_name(f".{place.name}.old")
    if not place.exists() and old.is_dir():
        os.rename(old, place)
    return place.is_dir()


def take_snapshot(place: Path, into: Path) -> FileIdentity:
    """Copy the submission at `place` by hard links, which take neither time nor space, or by real copies
    where links are not allowed. `into` appears complete or not at all, and replaces an earlier snapshot.
    Returns what identifies this submission among those at `place`.

    `BadSubmission` if there is none, or if it contains links, pipes and the like: the training is not
    trusted with paths. One call at a time for the same `into`.
    """
    partial = into.with_name(f".{into.name}.tmp")
    try:
        for _ in range(TRIES):
            shutil.rmtree(partial, ignore_errors=True)
            try:
                identity = _link_all(place, partial)
            except FileNotFoundError:
                continue
            _swap(partial, into)
            return identity
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    rule = "is not there, or was replaced again and again while copied"
    raise BadSubmission(str(place), [Fault(FaultKind.CHANGED, str(place), "", rule)])


def _link_all(place: Path, partial: Path) -> FileIdentity:
    """Link every file. `FileNotFoundError` if another submission came in meanwhile."""
    before = place.stat(follow_symlinks=False)
    if not stat.S_ISDIR(before.st_mode):
        raise FileNotFoundError(errno.ENOENT, "is not a folder", str(place))
    partial.mkdir(parents=True)
    try:
        listing = list_folder(place)
    except BadSubmission:
        if place.is_dir():
            raise
        raise FileNotFoundError(errno.ENOENT, "was replaced", str(place)) from None
    if listing.faults:
        raise BadSubmission(str(place), listing.faults)
    for entry in listing.files:
        _link(place / entry.path, partial / entry.path, entry)
    after = place.stat(follow_symlinks=False)
    # An inode number is reused as soon as it is free, so the time is compared too.
    if (file_identity(before), before.st_ctime_ns) != (file_identity(after), after.st_ctime_ns):
        raise FileNotFoundError(errno.ENOENT, "was replaced", str(place))
    return file_identity(before)


def _link(source: Path, target: Path, entry: FolderEntry) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target, follow_symlinks=False)
        status = target.stat(follow_symlinks=False)
    except OSError as error:
        # Another user's files cannot be linked (fs.protected_hardlinks), nor files of another file system.
        if error.errno not in (errno.EPERM, errno.EACCES, errno.EXDEV, errno.EMLINK, errno.ENOTSUP):
            raise
        with open(open_plain(source), "rb") as read, target.open("xb") as copy:
            shutil.copyfileobj(read, copy, 4 << 20)
            status = os.fstat(read.fileno())
    if file_identity(status) != entry.identity:
        raise FileNotFoundError(errno.ENOENT, "was replaced", str(source))


def _swap(new: Path, place: Path) -> None:
    if not place.exists():
        os.rename(new, place)
    elif _exchange(new, place):
        shutil.rmtree(new, ignore_errors=True)
    else:
        old = place.with_name(f".{place.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(place, old)
        os.rename(new, place)
        shutil.rmtree(old, ignore_errors=True)


def _exchange(new: Path, place: Path) -> bool:
    """Swap two folders in one step; False where that is not possible."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    done: int = renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(place), _RENAME_EXCHANGE)
    return done == 0


def _make_readable(folder: Path) -> None:
    """Safetensors are written for their owner alone, who in a container is not the publisher's user."""
    for path in (folder, *folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            path.chmod(stat.S_IMODE(mode) | 0o555)
        elif stat.S_ISREG(mode):
            path.chmod(stat.S_IMODE(mode) | 0o444)


def _flush(folder: Path) -> None:
    """Sync files and directories, so that the submission is complete even after a power cut."""
    for path in (*folder.rglob("*"), folder):
        if not path.is_symlink() and (path.is_file() or path.is_dir()):
            opened = os.open(path, os.O_RDONLY)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)
