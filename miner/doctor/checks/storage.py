"""Check the data directory and the database: writable, enough room, the right kind of disk, whole."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from miner.doctor.examine import CheckContext, DoctorCheck, Finding, fail, ok, skip, warn

GIB = 1024**3
#: Below the first the database soon cannot grow; below the second a model and its checkpoints do not fit.
MIN_FREE_BYTES, ENOUGH_FREE_BYTES = 1 * GIB, 50 * GIB

#: Disks of other machines: they lack the shared memory and locks that SQLite's write-ahead log relies on.
NETWORK_FILE_SYSTEMS = re.compile(
    r"9p|afs|beegfs|ceph|cifs|gpfs|lustre|ncpfs|nfs4?|smb3|smbfs|virtiofs"
    r"|fuse\.(ceph|glusterfs|juicefs|rclone|s3fs|sshfs)"
)
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})


def check_data_dir(context: CheckContext) -> Iterator[Finding]:
    wanted = context.settings.data_dir
    place = _nearest_existing(wanted)
    yield _writable(wanted, place)
    yield disk_space(shutil.disk_usage(place).free, wanted)
    yield disk_kind(file_system(place, Path("/proc/self/mountinfo").read_text()), wanted)


def disk_space(free: int, path: Path) -> Finding:
    detail = f"{free / GIB:.1f} GiB free for {path}"
    if free < MIN_FREE_BYTES:
        return fail("disk space", detail, "make room, or set DATA_DIR to a larger disk")
    if free < ENOUGH_FREE_BYTES:
        return warn(
            "disk space", detail, f"have {ENOUGH_FREE_BYTES // GIB} GiB free for models and checkpoints"
        )
    return ok("disk space", detail)


def disk_kind(kind: str, path: Path) -> Finding:
    if NETWORK_FILE_SYSTEMS.fullmatch(kind):
        return warn(
            "disk kind",
            f"{path} is on a network file system ({kind}), where a crash can damage the database",
            "set DATA_DIR to a local disk",
        )
    if kind in MEMORY_FILE_SYSTEMS:
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
    """Blanks and the like are written there as octal codes."""
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
        return fail("data directory", f"{place} cannot be written: {error.strerror}", fix)
    state = "can be written" if place == wanted else f"will be created in {place}"
    return ok("data directory", f"{wanted} {state}")


DATA_DIR_CHECK = DoctorCheck("data directory", check_data_dir)


RESTORE_FIX = "stop the daemon and restore a backup: docs/operations.md, Backups"


def check_store(context: CheckContext) -> Iterator[Finding]:
    from miner.store.database import (
        FILE_NAME,
        SCHEMA_VERSION,
        SchemaTooOld,
        StoreCorrupt,
        StoreUnavailable,
        schema_version,
    )

    path = context.settings.data_dir / FILE_NAME
    if not path.exists():
        yield skip("database", f"{path} is created at the first start")
        return
    try:
        version = schema_version(path)
        damage = _damage(path)
    except StoreCorrupt as error:
        yield fail("database", str(error), RESTORE_FIX)
        return
    except SchemaTooOld as error:
        yield fail("database", str(error), "set DATA_DIR to another directory, or move this one away")
        return
    except StoreUnavailable as error:
        yield fail("database", str(error), "end what else has it open; see `df` and the kernel log")
        return
    except sqlite3.Error as error:
        yield fail("database", f"{path} cannot be read: {error}", RESTORE_FIX)
        return
    if damage:
        yield fail("database", f"{path} is damaged: {damage}", RESTORE_FIX)
    elif version is not None and version > SCHEMA_VERSION:
        newer = f"{path} was written by a newer version (schema {version}, this one knows {SCHEMA_VERSION})"
        yield fail("database", newer, "run the newer version, or restore a backup from before the upgrade")
    else:
        yield ok("database", f"{path} is whole (schema {version or 'none yet: it is empty'})")


def _damage(path: Path) -> str:
    """What SQLite's quick check finds; empty if all is well."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)) as connection:
        rows = [str(row[0]) for row in connection.execute("PRAGMA quick_check(3)")]
    return "" if rows == ["ok"] else "; ".join(rows)


STORE_CHECK = DoctorCheck("database", check_store, 60.0)
