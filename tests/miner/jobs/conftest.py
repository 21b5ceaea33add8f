from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.miner.jobs.house import House, opened


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with opened(tmp_path / "data") as made:
        yield made
