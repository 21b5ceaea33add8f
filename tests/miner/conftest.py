"""A store for the tests of everything that reads or writes one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from miner.store import database
from miner.store.store import Store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = Store(database.prepare_store(tmp_path))
    opened.writer.start(asyncio.get_running_loop())
    yield opened
    await opened.writer.close()
