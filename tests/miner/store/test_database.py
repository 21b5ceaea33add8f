import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from core.domain.errors import GodMinerError
from miner.store import database
from miner.store.database import StoreUnavailable
from miner.store.offers import open_reservations
from miner.store.store import Store

LATER = (
    "ALTER TABLE events ADD COLUMN later TEXT NOT NULL DEFAULT 'x';",
    "ALTER TABLE events RENAME COLUMN later TO much_later;",
)


def set_version(path: Path, version: int) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")


def with_later_schema(monkeypatch: pytest.MonkeyPatch, *statements: str) -> int:
    """A version with further migrations; its number."""
    later = list(enumerate(statements, database.SCHEMA_VERSION + 1))
    known = database.migrations()
    monkeypatch.setattr(database, "migrations", lambda: [*known, *later])
    monkeypatch.setattr(database, "SCHEMA_VERSION", later[-1][0])
    return later[-1][0]


def test_the_newest_migration_is_the_one_the_code_knows() -> None:
    assert [number for number, _ in database.migrations()] == list(range(1, database.SCHEMA_VERSION + 1))


@pytest.mark.process
def test_a_file_that_is_up_to_date_is_not_migrated(tmp_path: Path) -> None:
    path = database.prepare_store(tmp_path)
    before = path.read_bytes()
    code = (
        "import sys; from pathlib import Path; from miner.store import database;"
        "database.prepare_store(Path(sys.argv[1])); sys.exit('importlib.resources' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0
    assert path.read_bytes() == before


def test_the_file_is_the_operators_alone(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    path = database.prepare_store(directory)
    assert path.stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700


def newer(path: Path) -> None:
    database.prepare_store(path.parent)
    set_version(path, 9999)


def before_the_first_release(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
        connection.execute("CREATE TABLE jobs (id INTEGER)")


def of_something_else(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE jobs (a INTEGER)")


def of_something_else_with_our_version(path: Path) -> None:
    of_something_else(path)
    set_version(path, database.SCHEMA_VERSION)


def no_database(path: Path) -> None:
    path.write_bytes(b"hello" * 1000)


@pytest.mark.parametrize(
    ("make", "error", "advice"),
    [
        (newer, database.SchemaTooNew, r"schema 9999.*newer god-miner"),
        (before_the_first_release, database.SchemaTooOld, r"DATA_DIR.*move .* away"),
        (of_something_else, database.StoreCorrupt, r"not of god-miner; .*DATA_DIR"),
        (of_something_else_with_our_version, database.StoreCorrupt, r"not of god-miner; .*DATA_DIR"),
        (no_database, database.StoreCorrupt, "not a readable database"),
    ],
)
def test_a_file_that_is_not_ours_is_refused_with_the_way_out_and_left_as_it_is(
    tmp_path: Path, make: Callable[[Path], None], error: type[GodMinerError], advice: str
) -> None:
    path = tmp_path / database.FILE_NAME
    make(path)
    before = path.read_bytes()
    with pytest.raises(error, match=advice):
        database.prepare_store(tmp_path)
    with pytest.raises(error, match=advice), database.open_store(tmp_path):
        pass
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_older_file_is_upgraded_keeps_its_rows_and_a_copy_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = database.prepare_store(tmp_path)
    before = database.schema_version(path)
    with closing(database.connect(path)) as connection:
        connection.execute("INSERT INTO events (at, kind, data) VALUES (1, 'x', '{}')")
    newest = with_later_schema(monkeypatch, *LATER)
    database.prepare_store(tmp_path)
    copy = tmp_path / f"{database.FILE_NAME}.before-{newest}"
    assert (database.schema_version(path), database.schema_version(copy)) == (newest, before)
    assert copy.stat().st_mode & 0o777 == 0o600
    with closing(database.connect(path)) as connection:
        assert connection.execute("SELECT kind, much_later FROM events").fetchall()[0][:] == ("x", "x")


def test_a_store_that_is_locked_is_not_taken_for_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = database.prepare_store(tmp_path)
    before = path.read_bytes()
    monkeypatch.setattr(database, "LOCK_WAIT_SECONDS", 0.01)
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("PRAGMA locking_mode=EXCLUSIVE")
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreUnavailable, match=r"locked.*what else holds the file"):
            database.prepare_store(tmp_path)
        holder.execute("ROLLBACK")
    assert path.read_bytes() == before


def test_a_file_with_nothing_in_it_becomes_a_new_store(tmp_path: Path) -> None:
    path = tmp_path / database.FILE_NAME
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE t (a)")
        connection.execute("DROP TABLE t")
    assert path.stat().st_size > 0
    assert database.schema_version(database.prepare_store(tmp_path)) == database.SCHEMA_VERSION
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_log_that_a_removed_file_left_behind_does_not_get_into_the_new_one(tmp_path: Path) -> None:
    path = database.prepare_store(tmp_path)
    log = tmp_path / f"{database.FILE_NAME}-wal"
    with closing(database.connect(path)) as connection:
        connection.execute("INSERT INTO events (at, kind, data) VALUES (1, 'x', '{}')")
        left = log.read_bytes()
    path.unlink()
    log.write_bytes(left)
    database.prepare_store(tmp_path)
    with closing(database.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM events").fetchone()[0] == 0


@pytest.mark.parametrize("broken", ["ALTER TABLE no_such_table ADD COLUMN b", "no SQL at all"])
def test_an_upgrade_that_fails_changes_nothing(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = database.prepare_store(tmp_path)
    before = path.read_bytes()
    with_later_schema(monkeypatch, LATER[0], broken)
    with pytest.raises(StoreUnavailable):
        database.prepare_store(tmp_path)
    assert path.read_bytes() == before


def test_a_damaged_file_is_reported_as_such_when_it_is_read(tmp_path: Path) -> None:
    path = database.prepare_store(tmp_path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    with pytest.raises(database.StoreCorrupt, match="restore a backup"):
        Store(path).read_now(open_reservations)
