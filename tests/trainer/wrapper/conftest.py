"""One fork server for all: importing the training stack takes longer than most of the trainings here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.forks import ForkServer
from tests.trainer.tasks import ENDLESS, write_profile


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return write_profile(tmp_path / "profile.yaml")


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    return write_profile(tmp_path / "endless.yaml", **ENDLESS)
