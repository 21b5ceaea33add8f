"""A daemon for each test, in a folder of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from miner.config_files import what_if, worker
from tests.doubles.own_child import answered_by
from tests.miner.http.daemon_in_process import DaemonInProcess, open_daemon


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[DaemonInProcess]:
    async with open_daemon(tmp_path) as daemon:
        yield daemon


@pytest.fixture
def answered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions about a change are answered without a child."""
    monkeypatch.setattr(what_if, "run_order", answered_by(worker))
