"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

from tests.doubles.engine_fixtures import docker_host

__all__ = ["docker_host"]

# A shared machine makes any single example slow once in a while: that is no finding.
settings.register_profile("here", deadline=None)
settings.load_profile("here")
