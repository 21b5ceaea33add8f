"""The same daemon without sockets that the tests of the API use."""

from tests.miner.http.conftest import running

__all__ = ["running"]
