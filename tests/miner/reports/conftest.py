"""The store of the store's own tests."""

from __future__ import annotations

from tests.miner.store.conftest import store

__all__ = ["store"]
