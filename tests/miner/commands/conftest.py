"""The same daemon without sockets that the tests of the API use."""

from tests.miner.api.conftest import house, template

__all__ = ["house", "template"]
