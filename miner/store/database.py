"""The file itself: opening it, its pragmas, its schema version, and the lock that keeps it ours."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from core.errors import GodMinerError
from miner.store.writer import StoreUnavailable

log = logging.getLogger(__name__)

FILE_NAME = "god-miner.sqlite3"
LOCK_NAME = "god-miner.lock"
LOCK_WAIT_SECONDS = 10.0

#: The newest migration. Held against the migrations folder by a test; known here so that a daemon whose
#: file is up to date starts without importing Alembic (a quarter of a second).
HEAD = "0004"

#: How long the start waits for another program to let go of the file.
SCHEMA_SECONDS = 5.0


class SchemaTooNew(GodMinerError):
    code = "schema_too_new"


class DataDirLocked(GodMinerError):
    code = "data_dir_locked"


class DataDirUnusable(GodMinerError):
    """DATA_DIR or a file in it is not ours to write. It will not be in a minute either."""

    code = "data_dir_unusable"


class StoreCorrupt(GodMinerError):
    code = "store_corrupt"


@contextmanager
def failures_told(path: Path) -> Iterator[None]:
    """What a disk can do to us, in words for the operator. All but damage may be over at the next start."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise StoreCorrupt(
                f"{path} is not a readable database ({error}); restore a backup or move the file away"
            ) from error
        raise StoreUnavailable(
            f"{path} can't be used ({error}); free disk space, or look who else holds the file"
        ) from error


def removed_files(path: Path) -> list[str]:
    """Those of the database's files that this process has open and somebody has removed: what is written to
    them is lost, and nothing can be written besides."""
    lost: set[str] = set()
    names = {os.path.realpath(path) + tail for tail in ("", "-wal")}
    for link in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed meanwhile
            found = os.readlink(link)
            lost |= {name for name in names if found == f"{name} (deleted)"}
    return sorted(lost)


def connect(path: Path) -> sqlite3.Connection:
    """The writer's connection. Autocommit mode: transactions are begun and ended in plain sight."""
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
    """A connection that can't write and never waits for the writer."""
    connection = _open(path)
    connection.execute("PRAGMA query_only=ON")
    return connection


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, isolation_level=None, timeout=LOCK_WAIT_SECONDS, check_same_thread=False
    )
    connection.row_factory = sqlite3.Row
    return connection


def schema_version(path: Path) -> str | None:
    """The file's migration, None for a file with nothing in it.

    Only a file that is known to be empty may count as new: new books take the place of what was there. So
    whatever keeps it from being read is raised, a lock held by somebody else as well.
    """
    if not path.exists() or path.stat().st_size == 0:
        return None
    with failures_told(path), closing(_open(path)) as connection:
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
        if not tables:
            return None
        row = None
        if "alembic_version" in tables:
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    if row is None:
        raise StoreCorrupt(f"{path} is a database, but not of god-miner; move it away, or set DATA_DIR")
    return str(row[0])


def make_folder(data_dir: Path) -> None:
    """Make the folder, and see that what is in it can be written."""
    advice = "change its owner or mode, or set DATA_DIR to another folder"
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise DataDirUnusable(f"{data_dir} can't be made a folder ({error.strerror}); {advice}") from None
    if not os.access(data_dir, os.R_OK | os.W_OK | os.X_OK):
        raise DataDirUnusable(f"{data_dir} can't be written by user {os.geteuid()}; {advice}")
    for name in (LOCK_NAME, FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"):
        path = data_dir / name
        if path.exists() and not os.access(path, os.R_OK | os.W_OK):
            raise DataDirUnusable(f"{path} can't be written by user {os.geteuid()}; {advice}")


def prepare(data_dir: Path) -> Path:
    """Make the folder and the file ready for this version of the code; the path of the file."""
    make_folder(data_dir)
    path = data_dir / FILE_NAME
    with failures_told(path):
        return _prepare(path)


def _prepare(path: Path) -> Path:
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
    from sqlalchemy.exc import DBAPIError

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("sqlalchemy.url", f"sqlite:///{path}".replace("%", "%%"))
    try:
        command.upgrade(config, revision)
    except DBAPIError as error:
        raise error.orig or error from error


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
    partial.touch(mode=0o600)
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
        make_folder(self._path.parent)
        with failures_told(self._path):
            self._acquire()

    def _acquire(self) -> None:
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
