"""A daemon for each test, in a folder of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.miner.http.daemon_in_process import DaemonInProcess, open_daemon


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[DaemonInProcess]:
    async with open_daemon(tmp_path) as daemon:
        yield daemon
