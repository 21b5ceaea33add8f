"""The file itself: opening it, its pragmas, its schema version, and the lock that keeps it ours."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
from contextlib import closing
from pathlib import Path

from core.errors import GodMinerError

log = logging.getLogger(__name__)

FILE_NAME = "god-miner.sqlite3"
LOCK_NAME = "god-miner.lock"

#: The newest migration. Held against the migrations folder by a test; known here so that a daemon whose
#: file is up to date starts without importing Alembic (a quarter of a second).
HEAD = "0001"


class SchemaTooNew(GodMinerError):
    code = "schema_too_new"


class DataDirLocked(GodMinerError):
    code = "data_dir_locked"


class StoreCorrupt(GodMinerError):
    code = "store_corrupt"


def connect(path: Path) -> sqlite3.Connection:
    """The writer's connection. Autocommit mode: transactions are begun and ended in plain sight."""
    connection = _open(path)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA journal_size_limit=67108864")
    return connection


def connect_for_reading(path: Path) -> sqlite3.Connection:
    """A connection that can't write and never waits for the writer."""
    connection = _open(path)
    connection.execute("PRAGMA query_only=ON")
    return connection


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, timeout=10.0, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    return connection


def schema_version(path: Path) -> str | None:
    """The file's migration, None for a file that has none yet."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    with closing(sqlite3.connect(path)) as connection:
        try:
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        except sqlite3.OperationalError:
            return None
        except sqlite3.DatabaseError as error:
            raise StoreCorrupt(
                f"{path} is not a readable database ({error}); restore a backup or move the file away"
            ) from None
    return str(row[0]) if row else None


def prepare(data_dir: Path) -> Path:
    """Make the folder and the file ready for this version of the code; the path of the file."""
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = data_dir / FILE_NAME
    found = schema_version(path)
    if found == HEAD:
        return path
    if found is not None and found > HEAD:
        raise SchemaTooNew(
            f"{path} has schema {found!r}, newer than {HEAD!r} of this version; "
            "run the newer god-miner, or restore the backup that the upgrade left beside the file"
        )
    if found is not None:
        backup = path.with_name(f"{path.name}.before-{HEAD}")
        log.info("upgrading the store from schema %s to %s; backup at %s", found, HEAD, backup)
        _copy(path, backup)
    _migrate_beside(path, fresh=found is None)
    return path


def migrate(path: Path, revision: str = "head") -> None:
    """Run the migrations on a file. Imports Alembic, so only called when there is something to do."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("sqlalchemy.url", f"sqlite:///{path}".replace("%", "%%"))
    command.upgrade(config, revision)


def _migrate_beside(path: Path, *, fresh: bool) -> None:
    """Migrate a copy and rename it in: SQLite's DDL is not one transaction, a rename is."""
    work = path.with_name(f"{path.name}.migrating")
    work.unlink(missing_ok=True)
    if not fresh:
        _copy(path, work)
    migrate(work)
    work.chmod(0o600)
    for leftover in (path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
        leftover.unlink(missing_ok=True)  # its content is in the copy; beside the new file it would be poison
    os.replace(work, path)


def _copy(path: Path, target: Path) -> None:
    partial = target.with_name(target.name + ".part")
    partial.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(partial)) as copy:
        source.backup(copy)
        # What lies in the write-ahead log goes into the file, so that dropping the log loses nothing.
        source.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    os.replace(partial, target)


class DataDirLock:
    """One daemon per data folder: two would each accept the same nonce and start the same job."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / LOCK_NAME
        self._handle: int | None = None

    def acquire(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise DataDirLocked(
                f"{self._path.parent} is in use by another god-miner (pid {holder}); "
                "stop that one, or give this one its own DATA_DIR"
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        self._handle = handle

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
