"""What all tests share."""

from __future__ import annotations

import importlib.util

from hypothesis import settings

# The training environment runs the trainer's tests without the daemon's packages.
if importlib.util.find_spec("pydantic_settings") is not None:
    from tests.doubles.engine_fixtures import docker_host  # noqa: F401

# A shared machine makes any single example slow once in a while: that is no finding.
settings.register_profile("here", deadline=None)
settings.load_profile("here")
