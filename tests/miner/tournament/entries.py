"""Small entries for the checks' tests: repositories with just what a rule looks at."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from miner.tournament.check_entry import CheckedEntry, open_entry
from tests.miner.tournament.repositories import make_repository

#: A Saturday.
NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def open_small(folder: Path, files: Mapping[str, str | bytes], **more: Any) -> CheckedEntry:
    """A repository with these files below `folder`, opened without a network."""
    make_repository(folder / "repository", files)
    return open_again(folder, **more)


def open_again(folder: Path, **more: Any) -> CheckedEntry:
    number = len(list(folder.glob("clones-*")))
    place = folder / f"clones-{number}"
    place.mkdir()
    chosen: dict[str, Any] = {"offline": True, "now": NOW, **more}
    return open_entry(str(folder / "repository"), place, **chosen)
