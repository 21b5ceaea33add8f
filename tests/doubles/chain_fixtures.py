"""Fixtures around the chain double; import them into the test module or conftest that needs them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.chain import Subtensor, neurons
from tests.doubles.chain_node import ChainDouble
from tests.doubles.chain_spec import ChainSpec, golden_file
from tests.doubles.required import missing

NETUID = 56


@pytest.fixture(scope="session")
def chain_spec() -> ChainSpec:
    """The real runtime's types. Skipped where they cannot be had, required with CI=true."""
    try:
        return ChainSpec(golden_file())
    except (subprocess.SubprocessError, OSError) as error:
        missing(f"the metadata of the chain cannot be downloaded: {getattr(error, 'stderr', '') or error}")


@pytest.fixture
def subtensor(chain_spec: ChainSpec, tmp_path: Path) -> Subtensor:
    """A chain of this test alone: 32 nodes on subnet 56, uid 0 and 1 validators."""
    return Subtensor(chain_spec, name=str(tmp_path), subnets={NETUID: neurons(32)})


@pytest.fixture
def node(subtensor: Subtensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChainDouble]:
    # Wins over what the daemon would set, so that no test sees the metadata of another.
    monkeypatch.setenv("BITTENSOR_RUNTIME_CACHE_DIR", str(tmp_path / "runtime-cache"))
    with ChainDouble(subtensor) as double:
        yield double
