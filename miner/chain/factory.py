"""Picks the chain source that the settings ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from miner.chain.base import ChainSource
from miner.chain.nodes_file import NodesFileSource
from miner.chain.sdk import SdkSource
from miner.identity import Identity


class ChainSettings(Protocol):
    """The settings that say where the subnet's nodes come from."""

    @property
    def netuid(self) -> int: ...

    @property
    def chain(self) -> str: ...

    @property
    def subtensor_network(self) -> str: ...

    @property
    def subtensor_address(self) -> str | None: ...

    @property
    def nodes_file(self) -> Path: ...

    @property
    def data_dir(self) -> Path: ...

    @property
    def chain_timeout_seconds(self) -> float: ...

    @property
    def allow_private_axon(self) -> bool: ...


def build_source(settings: ChainSettings, identity: Identity | None) -> ChainSource:
    """The source that `CHAIN` names. Connects to nothing; without an identity it can read but not publish."""
    if settings.chain == "file":
        return NodesFileSource(
            settings.nodes_file,
            settings.netuid,
            identity=identity,
            allow_private=settings.allow_private_axon,
        )
    return SdkSource(
        settings.netuid,
        settings.subtensor_network,
        address=settings.subtensor_address,
        identity=identity,
        timeout=settings.chain_timeout_seconds,
        allow_private=settings.allow_private_axon,
        cache_dir=settings.data_dir / "runtime-cache",
    )
