"""Profiles for the little tasks of these tests.

What needs the stack is imported where it is used: this file is also read where there is none.
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    from tests.trainer.tasks import write_profile

    return write_profile(tmp_path / "profile.yaml")


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    from tests.trainer.tasks import ENDLESS, write_profile

    return write_profile(tmp_path / "endless.yaml", **ENDLESS)
