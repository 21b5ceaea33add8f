"""A data directory for the tests of several commands, and the daemon without sockets of the API's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.miner.http.conftest import running

__all__ = ["data_dir", "running"]


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data directory, which is the working directory as well; tables are 200 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path
