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
from miner.store.schema import Base


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
    assert database.schema_version(tmp_path / f"{database.FILE_NAME}.before-{database.HEAD}") == "0000"
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
