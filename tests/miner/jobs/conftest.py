from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.miner.jobs.harness import JobsHarness, open_harness


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[JobsHarness]:
    async with open_harness(tmp_path / "data") as harness:
        yield harness
