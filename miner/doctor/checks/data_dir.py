"""The data directory: can it be written, is there room, is it the right kind of disk."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from miner.doctor.examine import Check, Surroundings
from miner.doctor.finding import Finding, fail, ok, warn

GIB = 1024**3
#: Below the first the database soon can not grow; below the second a model and its checkpoints do not fit.
TOO_LITTLE, LITTLE = 1 * GIB, 50 * GIB

#: Disks of other machines: they lack the shared memory and locks that SQLite's write-ahead log relies on.
NETWORK = re.compile(
    r"9p|afs|beegfs|ceph|cifs|gpfs|lustre|ncpfs|nfs4?|smb3|smbfs|virtiofs"
    r"|fuse\.(ceph|glusterfs|juicefs|rclone|s3fs|sshfs)"
)
MEMORY = frozenset({"tmpfs", "ramfs"})


def run(surroundings: Surroundings) -> Iterator[Finding]:
    wanted = surroundings.settings.data_dir
    place = _nearest_existing(wanted)
    yield _writable(wanted, place)
    yield room(shutil.disk_usage(place).free, wanted)
    yield disk_kind(file_system(place, Path("/proc/self/mountinfo").read_text()), wanted)


def room(free: int, path: Path) -> Finding:
    detail = f"{free / GIB:.1f} GiB free for {path}"
    if free < TOO_LITTLE:
        return fail("disk space", detail, "make room, or set DATA_DIR to a larger disk")
    if free < LITTLE:
        return warn("disk space", detail, f"have {LITTLE // GIB} GiB free for models and checkpoints")
    return ok("disk space", detail)


def disk_kind(kind: str, path: Path) -> Finding:
    if NETWORK.fullmatch(kind):
        return warn(
            "disk kind",
            f"{path} is on a network file system ({kind}), where a crash can damage the database",
            "set DATA_DIR to a local disk",
        )
    if kind in MEMORY:
        return warn(
            "disk kind",
            f"{path} is in memory ({kind}): accepted jobs are forgotten when the machine restarts",
            "set DATA_DIR to a disk",
        )
    return ok("disk kind", kind)


def file_system(path: Path, mountinfo: str) -> str:
    """The kind of file system that a path is on, from the text of /proc/self/mountinfo."""
    best, kind = -1, "unknown"
    real = path.resolve()
    for line in mountinfo.splitlines():
        fields, _, tail = line.partition(" - ")
        point = Path(_unescaped(fields.split()[4]))
        if real.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), tail.split()[0]
    return kind


def _unescaped(point: str) -> str:
    """Blanks and the like are written as octal codes there."""
    return point.encode().decode("unicode_escape").encode("latin-1").decode(errors="replace")


def _nearest_existing(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.exists())


def _writable(wanted: Path, place: Path) -> Finding:
    fix = f"give the daemon's user (uid {os.getuid()}) this directory, or set DATA_DIR to another one"
    if not place.is_dir():
        return fail("data directory", f"{place} is not a directory", "set DATA_DIR to a directory")
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return fail("data directory", f"{place} can not be written: {error.strerror}", fix)
    made = "can be written" if place == wanted else f"will be made in {place}"
    return ok("data directory", f"{wanted} {made}")


CHECK = Check("data directory", run)
