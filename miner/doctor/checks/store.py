"""The database: is it whole, and of a version that this code reads."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from miner.doctor.examine import Check, Surroundings
from miner.doctor.finding import Finding, fail, ok, skip

RESTORE = "stop the daemon and restore a backup: docs/operations.md, Backups"


def run(surroundings: Surroundings) -> Iterator[Finding]:
    from miner.store.database import FILE_NAME, HEAD, StoreCorrupt, schema_version
    from miner.store.writer import StoreUnavailable

    path = surroundings.settings.data_dir / FILE_NAME
    if not path.exists():
        yield skip("database", f"{path} is made at the first start")
        return
    try:
        found = schema_version(path)
        damage = _damage(path)
    except StoreCorrupt as error:
        yield fail("database", str(error), RESTORE)
        return
    except StoreUnavailable as error:
        yield fail("database", str(error), "end what else has it open; `df` and the kernel log tell of disks")
        return
    except sqlite3.Error as error:
        yield fail("database", f"{path} can not be read: {error}", RESTORE)
        return
    if damage:
        yield fail("database", f"{path} is damaged: {damage}", RESTORE)
    elif found is not None and found > HEAD:
        newer = f"{path} was written by a newer version (schema {found}, this one knows {HEAD})"
        yield fail("database", newer, "run the newer version, or restore the backup made before the upgrade")
    else:
        yield ok("database", f"{path} is whole (schema {found or 'none yet: it is empty'})")


def _damage(path: Path) -> str:
    """What SQLite's own quick check says, empty when all is well."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)) as connection:
        rows = [str(row[0]) for row in connection.execute("PRAGMA quick_check(3)")]
    return "" if rows == ["ok"] else "; ".join(rows)


CHECK = Check("database", run, 60.0)
