"""The SQLite file: open it, its pragmas, its schema, and the lock on the data directory.

All statements are plain SQL: one takes a few microseconds, and an ORM would be a fifth of a request's cost
and a third of the start. The schema is in `migrations/`; `PRAGMA user_version` is the number of the newest
file applied.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from core.domain.errors import GodMinerError

log = logging.getLogger(__name__)

FILE_NAME = "god-miner.sqlite3"
#: "GodM": marks a database as ours, whatever its tables are.
APPLICATION_ID = 0x476F644D
LOCK_NAME = "god-miner.lock"
LOCK_WAIT_SECONDS = 10.0

#: The number of the newest file in `migrations/`. A test holds the two together; the files are only read when
#: a file is new or older.
SCHEMA_VERSION = 4


class StoreUnavailable(GodMinerError):
    """The store cannot be written: disk full, locked, or too much waiting. Nothing was accepted."""

    code = "store_unavailable"


class NoStore(GodMinerError):
    code = "no_store"


class SchemaTooNew(GodMinerError):
    code = "schema_too_new"


class SchemaTooOld(GodMinerError):
    """The file is of a version from before the first release, whose schema is not migrated."""

    code = "schema_too_old"


class DataDirLocked(GodMinerError):
    code = "data_dir_locked"


class DataDirUnusable(GodMinerError):
    """DATA_DIR or a file in it is not writable by this user. Waiting does not help."""

    code = "data_dir_unusable"


class StoreCorrupt(GodMinerError):
    code = "store_corrupt"


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Raise disk and SQLite errors as errors for the operator. All but damage may be over at the next try."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise StoreCorrupt(
                f"{path} is not a readable database ({error}); restore a backup or move the file away"
            ) from error
        raise StoreUnavailable(
            f"{path} cannot be used ({error}); free disk space, or see what else holds the file"
        ) from error


# Opening


def connect(path: Path) -> sqlite3.Connection:
    """Open the writer's connection. Autocommit mode: transactions are begun and ended explicitly."""
    connection = _open(path)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA journal_size_limit=67108864")
    # In pages: a checkpoint holds all replies up, for a fifth of a second on a shared disk. Rarer ones also
    # write a page once that many commits have touched.
    connection.execute("PRAGMA wal_autocheckpoint=8000")
    return connection


def connect_for_reading(path: Path) -> sqlite3.Connection:
    """Open a connection that cannot write and never waits for the writer."""
    connection = _open(path)
    connection.execute("PRAGMA query_only=ON")
    return connection


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, isolation_level=None, timeout=LOCK_WAIT_SECONDS, check_same_thread=False
    )
    connection.row_factory = sqlite3.Row
    return connection


@contextmanager
def open_store(store_dir: Path) -> Iterator[sqlite3.Connection]:
    """Open the store for reading, beside a daemon that may be running."""
    path = store_dir / FILE_NAME
    version = schema_version(path)
    if version is None:
        raise NoStore(
            f"{path} does not exist; the daemon creates it at its first start, or set DATA_DIR (or STORE_DIR)"
        )
    if version > SCHEMA_VERSION:
        raise _too_new(path, version)
    if version < SCHEMA_VERSION:
        raise NoStore(
            f"{path} has schema {version}, this version reads {SCHEMA_VERSION}; "
            "the daemon brings an older store up to date when it starts"
        )
    with store_errors(path), closing(connect_for_reading(path)) as connection:
        yield connection


def removed_files(path: Path) -> list[str]:
    """Return the database files that this process has open although somebody removed them.

    What is written to them is lost, and nothing else can be written.
    """
    removed: set[str] = set()
    names = {os.path.realpath(path) + suffix for suffix in ("", "-wal")}
    for link in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(link)
            removed |= {name for name in names if target == f"{name} (deleted)"}
    return sorted(removed)


# The schema


def prepare_store(store_dir: Path) -> Path:
    """Create the directory and the file, or bring them up to this version; return the file's path."""
    make_data_dir(store_dir)
    path = store_dir / FILE_NAME
    with store_errors(path):
        version = schema_version(path)
        if version is None:
            path.touch(mode=0o600)
            path.chmod(0o600)
            migrate(path, 0)
        elif version > SCHEMA_VERSION:
            raise _too_new(path, version)
        elif version < SCHEMA_VERSION:
            log.info("upgrading the store from schema %d to %d", version, SCHEMA_VERSION)
            _back_up(path, version)
            migrate(path, version)
    return path


def _too_new(path: Path, version: int) -> SchemaTooNew:
    return SchemaTooNew(
        f"{path} has schema {version}, newer than {SCHEMA_VERSION} of this version; run the newer god-miner, "
        f"or restore the copy from before the upgrade ({FILE_NAME}.before-{version})"
    )


def _back_up(path: Path, version: int) -> None:
    """Keep a copy beside the file: an upgrade that succeeds cannot be undone."""
    copy = path.with_name(f"{path.name}.before-{SCHEMA_VERSION}")
    copy.unlink(missing_ok=True)
    copy.touch(mode=0o600)
    with closing(_open(path)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    log.info("kept %s, the store with schema %d", copy, version)


def schema_version(path: Path) -> int | None:
    """Return the number of the file's newest migration, or None if the file is empty.

    Only a file that is known to be empty may count as new. So whatever keeps it from being read is raised,
    a lock held by somebody else as well.
    """
    if not path.exists() or path.stat().st_size == 0:
        return None
    with store_errors(path), closing(_open(path)) as connection:
        version: int = connection.execute("PRAGMA user_version").fetchone()[0]
        application: int = connection.execute("PRAGMA application_id").fetchone()[0]
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    if "alembic_version" in tables:
        raise SchemaTooOld(
            f"{path} was written before version 0.1.0, whose first schema cannot take it over; "
            f"set DATA_DIR to another directory, or move {path.parent} away"
        )
    if not tables and version == 0:
        return None
    if version == 0 or application != APPLICATION_ID:
        raise StoreCorrupt(f"{path} is a database, but not of god-miner; move it away, or set DATA_DIR")
    return version


def migrations() -> list[tuple[int, str]]:
    """Return the number and the SQL of every migration, in order."""
    from importlib import resources  # several milliseconds that only a new or older file needs

    files = (resources.files("miner.store") / "migrations").iterdir()
    return sorted((int(file.name[:4]), file.read_text()) for file in files if file.name.endswith(".sql"))


def migrate(path: Path, version: int) -> None:
    """Apply what comes after `version`, in one transaction: all of it, or the file stays as it was."""
    later = [(number, sql) for number, sql in migrations() if number > version]
    script = [
        "BEGIN IMMEDIATE;",
        *(sql for _, sql in later),
        f"PRAGMA application_id = {APPLICATION_ID};",
        f"PRAGMA user_version = {later[-1][0]};",
        "COMMIT;",
    ]
    with closing(_open(path)) as connection:
        connection.executescript("\n".join(script))


# The data directory


def make_data_dir(data_dir: Path) -> None:
    """Make the directory, and check that what is in it can be written."""
    advice = "change its owner or mode, or set DATA_DIR to another directory"
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise DataDirUnusable(f"{data_dir} cannot be created ({error.strerror}); {advice}") from None
    if not os.access(data_dir, os.R_OK | os.W_OK | os.X_OK):
        raise DataDirUnusable(f"{data_dir} cannot be written by user {os.geteuid()}; {advice}")
    for name in (LOCK_NAME, FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"):
        path = data_dir / name
        if path.exists() and not os.access(path, os.R_OK | os.W_OK):
            raise DataDirUnusable(f"{path} cannot be written by user {os.geteuid()}; {advice}")


class DataDirLock:
    """Locks the data directory for one daemon: two would each accept the same nonce and start the same job.
    If the store is elsewhere, its directory is locked too."""

    def __init__(self, *folders: Path) -> None:
        self._paths = [folder / LOCK_NAME for folder in dict.fromkeys(folders)]
        self._handles: list[int] = []

    def acquire(self) -> None:
        try:
            for path in self._paths:
                make_data_dir(path.parent)
                with store_errors(path):
                    self._handles.append(_locked_file(path))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        while self._handles:
            os.close(self._handles.pop())


def _locked_file(path: Path) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(handle)
        raise DataDirLocked(
            f"{path.parent} is in use by another god-miner (pid {holder}); "
            "stop that one, or give this one its own DATA_DIR"
        ) from None
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return handle


# Statements that several modules need


def insert_row(connection: sqlite3.Connection, table: str, **values: Any) -> int:
    """Insert a row by column names; return its id."""
    columns, parameters = ", ".join(values), ", ".join(f":{name}" for name in values)
    cursor = connection.execute(f"INSERT INTO {table} ({columns}) VALUES ({parameters})", values)  # noqa: S608
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def add_event(
    connection: sqlite3.Connection, now: float, kind: str, task_id: str | None, /, **data: Any
) -> None:
    """Add an event to the operator's history, in the transaction of what it reports."""
    insert_row(connection, "events", at=now, kind=kind, task_id=task_id, data=json.dumps(data))
