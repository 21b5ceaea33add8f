"""What all tests share."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import settings

from tests.doubles import watch

# The training environment runs the trainer's tests without the daemon's packages.
if importlib.util.find_spec("pydantic_settings") is not None:
    from tests.doubles.engine_fixtures import docker_host  # noqa: F401

# A shared machine makes any single example slow once in a while: that is no finding.
settings.register_profile("here", deadline=None)
settings.load_profile("here")


def pytest_configure(config: pytest.Config) -> None:
    watch.start(config)
