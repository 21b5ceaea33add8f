from tests.miner.store.conftest import store

__all__ = ["store"]
