"""Putting a folder in the place of another in one step.

Linux can exchange two paths atomically; then there is no instant without a complete folder, whatever is
killed when. File systems without that (some network ones) get the next best thing: the old folder is moved
aside first, and whoever comes next puts it back if the second move never happened.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path

_EXCHANGE = 2
_AT_FDCWD = -100
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}


def beside(place: Path, kind: str) -> Path:
    """A hidden neighbour of the same file system: `.name.kind`."""
    return place.parent / f".{place.name}.{kind}"


def put_in_place(new: Path, place: Path) -> None:
    """`new` becomes `place`; what was there is deleted."""
    if not place.exists():
        new.rename(place)
        return
    if exchange(new, place):
        shutil.rmtree(new, ignore_errors=True)
        return
    old = beside(place, "old")
    shutil.rmtree(old, ignore_errors=True)
    place.rename(old)
    new.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def restore(place: Path) -> None:
    """After a death between the two moves: the old folder goes back. Leftovers are deleted."""
    old, new = beside(place, "old"), beside(place, "new")
    if old.exists() and not place.exists():
        old.rename(place)
    for left in (old, new):
        shutil.rmtree(left, ignore_errors=True)


def exchange(one: Path, other: Path) -> bool:
    """False where the file system cannot; `OSError` for everything else."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    code = rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE)
    if code == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))
