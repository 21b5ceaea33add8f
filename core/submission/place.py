"""How a submission gets to its place, and how a copy of it is taken while a better one may arrive.

The trainer writes beside the place and swaps; whoever publishes takes hard links. Both ends are here because
the one is right only with the other: the place never holds half a submission, and a copy never mixes two.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from pathlib import Path

from core.submission.faults import BadSubmission, Fault, FaultKind
from core.submission.folder import Entry, Identity, identity, listing, open_plain

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
#: A swap takes milliseconds, so a copy that met one in the middle is simply taken again.
TRIES = 20


def put_in_place(new: Path, place: Path) -> None:
    """Make the complete folder `new` the one at `place`, in one step where the file system can (Linux: all
    usual ones); what was there before is removed afterwards. Both lie on one file system."""
    _let_others_read(new)
    _flush(new)
    _swap(new, place)


def settle(place: Path) -> bool:
    """After a crash: whether a submission lies at `place`; one that a swap in two steps had just put aside is
    put back."""
    old = place.with_name(f".{place.name}.old")
    if not place.exists() and old.is_dir():
        os.rename(old, place)
    return place.is_dir()


def freeze(place: Path, into: Path) -> Identity:
    """A copy of the submission at `place` that stays as it is: hard links, so that it costs neither time nor
    room; real copies where links are not allowed. `into` appears complete or not at all, in the place of an
    earlier copy if there is one. Returns what tells this submission from the next one at `place`.

    `BadSubmission` where there is none, or where links, pipes and the like lie in it: whoever trains is not
    to be trusted with a path. One at a time for the same `into`.
    """
    partial = into.with_name(f".{into.name}.tmp")
    try:
        for _ in range(TRIES):
            shutil.rmtree(partial, ignore_errors=True)
            try:
                taken = _link_all(place, partial)
            except FileNotFoundError:
                continue
            _swap(partial, into)
            return taken
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    rule = "is not there, or was replaced again and again while copied"
    raise BadSubmission(str(place), [Fault(FaultKind.CHANGED, str(place), "", rule)])


def _link_all(place: Path, partial: Path) -> Identity:
    """`FileNotFoundError` when another submission came in meanwhile."""
    before = place.stat(follow_symlinks=False)
    if not stat.S_ISDIR(before.st_mode):
        raise FileNotFoundError(errno.ENOENT, "is no folder", str(place))
    partial.mkdir(parents=True)
    try:
        seen = listing(place)
    except BadSubmission:
        if place.is_dir():
            raise
        raise FileNotFoundError(errno.ENOENT, "was replaced", str(place)) from None
    if seen.odd:
        raise BadSubmission(str(place), seen.odd)
    for entry in seen.files:
        _link(place / entry.path, partial / entry.path, entry)
    after = place.stat(follow_symlinks=False)
    # An inode's number is given out again as soon as it is free: the time belongs to it.
    if (identity(before), before.st_ctime_ns) != (identity(after), after.st_ctime_ns):
        raise FileNotFoundError(errno.ENOENT, "was replaced", str(place))
    return identity(before)


def _link(source: Path, target: Path, entry: Entry) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target, follow_symlinks=False)
        taken = target.stat(follow_symlinks=False)
    except OSError as error:
        # Another's files may not be linked (fs.protected_hardlinks), nor across file systems.
        if error.errno not in (errno.EPERM, errno.EACCES, errno.EXDEV, errno.EMLINK, errno.ENOTSUP):
            raise
        with open(open_plain(source), "rb") as read, target.open("xb") as made:
            shutil.copyfileobj(read, made, 4 << 20)
            taken = os.fstat(read.fileno())
    if identity(taken) != entry.identity:
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


def _let_others_read(folder: Path) -> None:
    """Safetensors are written for their owner alone, who in a container is not the one that publishes."""
    for path in (folder, *folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            path.chmod(stat.S_IMODE(mode) | 0o555)
        elif stat.S_ISREG(mode):
            path.chmod(stat.S_IMODE(mode) | 0o444)


def _flush(folder: Path) -> None:
    """What has been put in place must be whole after a power cut too: files, and the names they have."""
    for path in (*folder.rglob("*"), folder):
        if not path.is_symlink() and (path.is_file() or path.is_dir()):
            opened = os.open(path, os.O_RDONLY)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)
