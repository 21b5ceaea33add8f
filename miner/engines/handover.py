"""Folders given to the user that training runs as, when the daemon itself is root."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from miner.engines.base import EngineSpec, Mount, Rejected


def hand_over(spec: EngineSpec, mounts: Iterable[Mount], uid: int) -> None:
    """The run folder whole; of other writable folders the folder itself, whose content is the training's own
    from earlier attempts, or inputs that it only reads. Links are given away, never what they lead to."""
    own(spec.run_dir, uid)
    for mount in mounts:
        if not mount.read_only:
            os.chown(mount.path, uid, uid, follow_symlinks=False)
        elif not _readable(mount.path):
            raise Rejected(
                f"{mount.path} is not readable for user {uid}, which training runs as: "
                f"chmod -R a+rX {mount.path}"
            )


def own(folder: Path, uid: int) -> None:
    for _, folders, files, here in os.fwalk(folder, follow_symlinks=False):
        os.fchown(here, uid, uid)
        for name in (*folders, *files):
            os.chown(name, uid, uid, dir_fd=here, follow_symlinks=False)


def _readable(path: Path) -> bool:
    mode = path.stat().st_mode
    return bool(mode & 0o004) and (not path.is_dir() or bool(mode & 0o001))
