"""A daemon for each test, in a folder of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from miner.store import database
from tests.miner.api.house import House, open_house


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database: migrating one takes longer than most tests."""
    return database.prepare(tmp_path_factory.mktemp("template"))


@pytest.fixture
async def house(tmp_path: Path, template: Path) -> AsyncIterator[House]:
    async with open_house(tmp_path, template) as made:
        yield made
