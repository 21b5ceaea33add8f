import errno
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine

from miner.store import database
from miner.store.books import Books
from miner.store.schema import Base
from miner.store.writer import StoreUnavailable


def test_the_newest_migration_is_the_one_the_code_knows() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(database.__file__).parent / "migrations"))
    assert ScriptDirectory.from_config(config).get_heads() == [database.HEAD]


def test_migrations_lead_to_the_tables_as_typed(tmp_path: Path) -> None:
    from alembic.autogenerate import compare_metadata

    path = database.prepare(tmp_path)
    with create_engine(f"sqlite:///{path}").connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
        connection.engine.dispose()


def test_a_file_that_is_up_to_date_needs_no_alembic(tmp_path: Path) -> None:
    database.prepare(tmp_path)
    code = (
        "import sys; from pathlib import Path; from miner.store import database;"
        "database.prepare(Path(sys.argv[1])); sys.exit('alembic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0


def test_the_file_is_the_operators_alone(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    path = database.prepare(folder)
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_newer_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = database.prepare(tmp_path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    with pytest.raises(database.SchemaTooNew, match=r"'9999'.*newer god-miner"):
        database.prepare(tmp_path)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / database.FILE_NAME).write_bytes(b"hello" * 1000)
    with pytest.raises(database.StoreCorrupt, match="not a readable database"):
        database.prepare(tmp_path)


@pytest.mark.parametrize(
    "statement",
    ["CREATE TABLE of_somebody_else (kept TEXT)", "CREATE TABLE alembic_version (version_num TEXT)"],
)
def test_a_database_without_our_version_is_refused_and_left_as_it_is(statement: str, tmp_path: Path) -> None:
    path = tmp_path / database.FILE_NAME
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement)
    before = path.read_bytes()
    with pytest.raises(database.StoreCorrupt, match=r"not of god-miner; .*DATA_DIR"):
        database.prepare(tmp_path)
    assert path.read_bytes() == before


def test_books_that_somebody_else_has_locked_are_not_taken_for_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = database.prepare(tmp_path)
    before = path.read_bytes()
    monkeypatch.setattr(database, "LOCK_WAIT_SECONDS", 0.01)
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("PRAGMA locking_mode=EXCLUSIVE")
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreUnavailable, match=r"locked.*who else holds the file"):
            database.prepare(tmp_path)
        holder.execute("ROLLBACK")
    assert path.read_bytes() == before


def test_a_file_with_nothing_in_it_becomes_new_books(tmp_path: Path) -> None:
    path = tmp_path / database.FILE_NAME
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 1")  # a database, and no tables
    assert path.stat().st_size > 0
    assert database.schema_version(database.prepare(tmp_path)) == database.HEAD


def test_a_migration_on_a_full_disk_is_told_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_full_disk(work: Path, revision: str = "head") -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = database.prepare(tmp_path)
    with closing(database.connect(path)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0000'")
    monkeypatch.setattr(database, "migrate", on_full_disk)
    with pytest.raises(StoreUnavailable, match=r"No space left.*free disk space"):
        database.prepare(tmp_path)
    assert database.schema_version(path) == "0000"


def test_a_damaged_file_is_told_as_such_when_it_is_read(tmp_path: Path) -> None:
    path = database.prepare(tmp_path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    with pytest.raises(database.StoreCorrupt, match="restore a backup"):
        Books(path).taken()


def test_an_older_file_is_upgraded_with_a_backup_and_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = database.prepare(tmp_path)
    with closing(database.connect(path)) as connection:
        connection.execute("INSERT INTO events (at, kind, data) VALUES (1, 'x', '{}')")
        connection.execute("UPDATE alembic_version SET version_num = '0000'")
    seen: list[Path] = []

    def upgrade(work: Path, revision: str = "head") -> None:
        seen.append(work)
        with closing(sqlite3.connect(work)) as connection:
            connection.execute("UPDATE alembic_version SET version_num = ?", (database.HEAD,))
            connection.commit()

    monkeypatch.setattr(database, "migrate", upgrade)
    database.prepare(tmp_path)
    assert database.schema_version(path) == database.HEAD
    assert seen != [path]  # a copy was migrated, then renamed in
    backup = tmp_path / f"{database.FILE_NAME}.before-{database.HEAD}"
    assert database.schema_version(backup) == "0000"
    assert backup.stat().st_mode & 0o777 == 0o600
    with closing(database.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM events").fetchone()[0] == 1


def test_a_migration_cut_short_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = database.prepare(tmp_path)
    with closing(database.connect(path)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0000'")

    def dies(work: Path, revision: str = "head") -> None:
        work.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(database, "migrate", dies)
    with pytest.raises(KeyboardInterrupt):
        database.prepare(tmp_path)
    assert database.schema_version(path) == "0000"


def test_only_one_daemon_holds_a_data_folder(tmp_path: Path) -> None:
    first, second = database.DataDirLock(tmp_path), database.DataDirLock(tmp_path)
    first.acquire()
    with pytest.raises(database.DataDirLocked, match=rf"pid {os.getpid()}.*DATA_DIR"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
