"""What a test needs of the machine: skipped with the reason on a laptop, a failure with CI=true."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(why: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture(scope="session")
def training_python() -> str:
    """The interpreter of an environment with the training stack."""
    name = "GOD_MINER_TRAINING_PYTHON"
    return os.environ.get(name) or missing(f"{name} is not set: run make training")
