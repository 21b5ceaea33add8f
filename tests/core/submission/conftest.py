"""What the tests of submissions share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def tmp_path_factory_shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all examples of a property."""
    return tmp_path_factory.mktemp("examples")
