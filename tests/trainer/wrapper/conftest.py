"""One fork server for all: importing the training stack takes longer than most of the trainings here.

What needs the stack is imported where it is used: this file is also read where there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.forks import ForkServer


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    from tests.trainer.tasks import write_profile

    return write_profile(tmp_path / "profile.yaml")


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    from tests.trainer.tasks import ENDLESS, write_profile

    return write_profile(tmp_path / "endless.yaml", **ENDLESS)
