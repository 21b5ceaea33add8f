"""Give files to the user that training runs as, when the daemon itself is root."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from miner.engines.base import EngineSpec, Mount, Rejected


def hand_over(spec: EngineSpec, mounts: Iterable[Mount], uid: int, trusted: Iterable[Path] = ()) -> None:
    """Give away the run directory with all it holds, and other writable directories without what they hold.

    That is the training's own, from earlier attempts. Links are given away, never what they lead to.

    Inputs must be readable. Below `trusted`, our own directories, they are made so; otherwise `Rejected`.
    """
    own(spec.run_dir, uid)
    for mount in mounts:
        if not mount.read_only:
            os.chown(mount.path, uid, uid, follow_symlinks=False)
            continue
        for path in _unreadable(mount.path, uid):
            ours = any(mount.path.is_relative_to(place) for place in trusted)
            if not (ours and _made_readable(path, mount.path)):
                raise Rejected(
                    f"{path} is not readable for user {uid}, which training runs as: "
                    f"chmod -R a+rX {mount.path}"
                )


def own(folder: Path, uid: int) -> None:
    for _, folders, files, here in os.fwalk(folder, follow_symlinks=False):
        os.fchown(here, uid, uid)
        for name in (*folders, *files):
            os.chown(name, uid, uid, dir_fd=here, follow_symlinks=False)


def _unreadable(top: Path, uid: int) -> Iterator[Path]:
    """What this user may not read below `top`; directories before what they hold. Dead links are skipped."""
    if not _readable(top, uid):
        yield top
    for folder, folders, files in os.walk(top):
        for name in (*folders, *files):
            path = Path(folder, name)
            if path.exists() and not _readable(path, uid):
                yield path


def _readable(path: Path, uid: int) -> bool:
    found = path.stat()
    shift = 6 if found.st_uid == uid else 3 if found.st_gid == uid else 0
    wanted = 0o5 if stat.S_ISDIR(found.st_mode) else 0o4
    return (found.st_mode >> shift) & wanted == wanted


def _made_readable(path: Path, top: Path) -> bool:
    """Let everybody read a file or directory below `top`; False where a link leads out of it."""
    real = path.resolve()
    if not real.is_relative_to(top.resolve()):
        return False
    descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        mode = os.fstat(descriptor).st_mode
        os.fchmod(descriptor, stat.S_IMODE(mode) | (0o555 if stat.S_ISDIR(mode) else 0o444))
    finally:
        os.close(descriptor)
    return True
