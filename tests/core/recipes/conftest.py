"""Where the real training environment is, for the tests that ask the engine itself."""

from __future__ import annotations

import os

import pytest

VARIABLE = "GOD_MINER_TRAINING_PYTHON"


@pytest.fixture(scope="session")
def training_python() -> str:
    """The interpreter of an environment with Axolotl; required in CI, else the test is skipped."""
    python = os.environ.get(VARIABLE)
    if python:
        return python
    reason = f"{VARIABLE} is not set: the python of an environment with Axolotl"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
