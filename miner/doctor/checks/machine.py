"""Check the machine: settings and their file, system and limits, disk and database, clock, pm2."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

from miner.doctor.examine import CheckContext, DoctorCheck
from miner.settings import ChainKind, Settings, without_keys
from miner.support.findings import Finding, fail, ok, skip, warn


def check_settings(context: CheckContext) -> Iterator[Finding]:
    settings = context.settings
    changed = sum(settings.source_of(name) != "default" for name in type(settings).model_fields)
    yield ok("settings", f"all values are good, {changed} of them set by you")
    for warning in settings.warnings:
        yield warn("settings", warning, f"correct the line in {context.env_file}, or take it out")
    yield from _env_file(context)


def _env_file(context: CheckContext) -> Iterator[Finding]:
    path = context.env_file
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield warn(
            "secrets", f"{path} has mode {mode:o}: others on this machine can read it", f"chmod 600 {path}"
        )
    else:
        yield ok("secrets", f"{path} is for its owner only (mode {mode:o})")


SETTINGS_CHECK = DoctorCheck("settings", check_settings)


#: Files that the daemon holds open besides its connections: database, logs, wallet, chain, libraries.
FILES_BESIDES_CONNECTIONS = 256


def check_host(context: CheckContext) -> Iterator[Finding]:
    yield _system()
    needed = context.settings.max_connections + FILES_BESIDES_CONNECTIONS
    yield open_files(needed, *resource.getrlimit(resource.RLIMIT_NOFILE))


def _system() -> Finding:
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    if sys.platform != "linux":
        return warn("system", system, "run it on Linux: nothing else is tested")
    return ok("system", system)


def open_files(needed: int, soft: int, hard: int) -> Finding:
    """Check that as many files may be open as MAX_CONNECTIONS needs."""
    if soft == resource.RLIM_INFINITY or soft >= needed:
        shown = "without limit" if soft == resource.RLIM_INFINITY else f"up to {soft}"
        return ok("open files", f"{shown}, {needed} needed")
    raise_it = f"ulimit -n {needed} in the shell that starts it (with pm2: then pm2 kill and start again)"
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise_it = (
            f"raise the hard limit of {hard} in /etc/security/limits.conf, log in again, then {raise_it}"
        )
    return warn(
        "open files",
        f"only {soft} may be open at once, and MAX_CONNECTIONS may need {needed}",
        f"{raise_it}; or set MAX_CONNECTIONS lower",
    )


HOST_CHECK = DoctorCheck("host", check_host)


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
    store = context.settings.store_dir
    place = _nearest_existing(store)
    if store != wanted:
        yield _writable(store, place, "database directory")
    yield disk_kind(file_system(place, Path("/proc/self/mountinfo").read_text()), store)


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
            "set STORE_DIR to a directory on a local disk",
        )
    if kind in MEMORY_FILE_SYSTEMS:
        return warn(
            "disk kind",
            f"{path} is in memory ({kind}): accepted jobs are forgotten when the machine restarts",
            "set DATA_DIR, or STORE_DIR, to a disk",
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


def _writable(wanted: Path, place: Path, what: str = "data directory") -> Finding:
    name = "DATA_DIR" if what == "data directory" else "STORE_DIR"
    fix = f"give the daemon's user (uid {os.getuid()}) this directory, or set {name} to another one"
    if not place.is_dir():
        return fail(what, f"{place} is not a directory", f"set {name} to a directory")
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return fail(what, f"{place} cannot be written: {error.strerror}", fix)
    state = "can be written" if place == wanted else f"will be created in {place}"
    return ok(what, f"{wanted} {state}")


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

    path = context.settings.store_dir / FILE_NAME
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
    """Run SQLite's quick check; return what it finds, or nothing if all is well."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)) as connection:
        rows = [str(row[0]) for row in connection.execute("PRAGMA quick_check(3)")]
    return "" if rows == ["ok"] else "; ".join(rows)


STORE_CHECK = DoctorCheck("database", check_store, 60.0)


#: Requests are accepted within 120 s; half of that is left to the validator's own clock.
WRONG_SECONDS, OFF_SECONDS = 60.0, 10.0
SYNC_FIX = "timedatectl set-ntp true, or run chrony; in a container, on its host"

#: The nodes behind the network names, copied from the SDK: importing it for this would take seconds.
NODES = {
    "finney": "wss://entrypoint-finney.opentensor.ai:443",
    "test": "wss://test.finney.opentensor.ai:443",
    "archive": "wss://archive.chain.opentensor.ai:443",
    "devnet": "wss://dev.chain.opentensor.ai:443",
    "local": "ws://127.0.0.1:9944",
}


def check_clock(context: CheckContext) -> Iterator[Finding]:
    yield _compare_with_node(context.settings)
    yield _time_service()


def clock_finding(offset: float, source: str) -> Finding:
    """`offset` is how many seconds this clock is ahead."""
    detail = f"{abs(offset):.0f} s {'ahead of' if offset >= 0 else 'behind'} {source}"
    if abs(offset) >= WRONG_SECONDS:
        return fail("clock", f"{detail}: validators' requests look too old or too new", SYNC_FIX)
    if abs(offset) >= OFF_SECONDS:
        return warn("clock", detail, SYNC_FIX)
    return ok("clock", f"within {max(abs(offset), 1):.0f} s of {source}")


def _compare_with_node(settings: Settings) -> Finding:
    if settings.chain is ChainKind.FILE:
        return skip("clock", "CHAIN=file: no other clock to compare with")
    address = settings.subtensor_address or NODES[settings.subtensor_network]
    offset = _offset_from_node(address)
    shown = without_keys(address)
    if offset is None:
        return skip(
            "clock", f"{shown} sends no time to compare with", "compare `date -u` with another machine"
        )
    return clock_finding(offset, shown)


def _offset_from_node(address: str) -> float | None:
    """Seconds that this clock is ahead of a node's, by the Date header that every HTTP response has."""
    import httpx

    parts = urlsplit(address)
    url = parts._replace(scheme="https" if parts.scheme == "wss" else "http").geturl()
    before = time.time()
    try:
        response = httpx.get(url, timeout=10.0, follow_redirects=False)
        date = parsedate_to_datetime(response.headers["date"]).timestamp()
    except (httpx.HTTPError, KeyError, ValueError):
        return None
    # The header is cut to whole seconds: on average half a second too old.
    return (before + time.time()) / 2 - (date + 0.5)


def _time_service() -> Finding:
    command = ["timedatectl", "show", "--property=NTPSynchronized", "--value"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = "is not installed" if isinstance(error, FileNotFoundError) else "does not answer"
        return skip("time service", f"timedatectl {why}", "make sure that the host keeps its clock right")
    answer = result.stdout.strip()
    if result.returncode != 0 or answer not in ("yes", "no"):
        return skip("time service", "timedatectl does not know (no systemd, as in containers)")
    if answer == "no":
        return warn("time service", "the clock is not synchronised", SYNC_FIX)
    return ok("time service", "the clock is synchronised")


CLOCK_CHECK = DoctorCheck("clock", check_clock, 30.0)


def check_pm2(context: CheckContext) -> Iterator[Finding]:
    program = shutil.which("pm2")
    if program is None:
        yield skip("pm2", "not installed; only needed to keep the daemon running", "npm install -g pm2")
        return
    yield ok("pm2", f"{_pm2_version(Path(program))} at {program}")
    home = Path(os.environ.get("PM2_HOME") or Path.home() / ".pm2")
    if (home / "modules" / "pm2-logrotate").exists():
        yield ok("log rotation", "pm2-logrotate is installed")
    else:
        yield warn(
            "log rotation",
            "pm2 lets its logs grow without end",
            "pm2 install pm2-logrotate (see docs/operations.md)",
        )


def _pm2_version(program: Path) -> str:
    """From its package, because calling pm2 would start its own daemon."""
    try:
        return str(json.loads((program.resolve().parent.parent / "package.json").read_bytes())["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return "some version"


PM2_CHECK = DoctorCheck("pm2", check_pm2)
