"""The refresher over the real SDK and a node that comes and goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from miner.chain.metagraph_refresh import MetagraphRefresher, RefreshTimes
from miner.chain.sources import SdkSource
from tests.doubles.chain import Subtensor
from tests.doubles.chain_fixtures import NETUID, chain_spec, node, subtensor
from tests.doubles.chain_node import ANY, ChainDouble, Fault

__all__ = ["chain_spec", "node", "subtensor"]
pytestmark = pytest.mark.process


async def test_a_node_that_is_killed_hangs_and_returns_never_takes_the_metagraph_away(
    subtensor: Subtensor, node: ChainDouble, tmp_path: Path
) -> None:
    now = [1000.0]
    alerts: list[tuple[str, str]] = []
    source = SdkSource(NETUID, address=node.url, timeout=60.0, clock=lambda: now[0])
    refresher = MetagraphRefresher(
        source,
        cache_path=tmp_path / "metagraph.json",
        times=RefreshTimes(300, 600),
        on_alert=lambda code, text: alerts.append((code, text)),
        clock=lambda: now[0],
    )
    assert await refresher.refresh_once()
    first = refresher.current
    node.stop()
    now[0] += 300
    assert not await refresher.refresh_once()
    assert (refresher.current, refresher.age(), alerts) == (first, 300.0, [])
    node.start()
    node.faults[ANY] = Fault.CLOSE_1000
    source.timeout = 2.0  # only where no answer will come
    now[0] += 301
    assert not await refresher.refresh_once()
    assert (refresher.current, refresher.age(), refresher.status().stale) == (first, 601.0, True)
    assert [code for code, _ in alerts] == ["metagraph_stale"]
    assert "no answer in 2 s" in alerts[0][1]
    node.faults.clear()
    source.timeout = 60.0
    subtensor.block = 140
    assert await refresher.refresh_once()
    status = refresher.status()
    assert (status.block, status.age, status.stale, status.last_error) == (140, 0.0, False, None)
    assert [code for code, _ in alerts] == ["metagraph_stale", "metagraph_recovered"]
