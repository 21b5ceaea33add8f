from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miner.chain import metagraph_refresh
from miner.chain.metagraph import Metagraph
from tests.miner.chain.fake_source import FakeSource
from tests.miner.chain.test_metagraph import graph, key, node

GENESIS = "0x" + "11" * 32


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "metagraph.json"


def full() -> Metagraph:
    nodes = (node(0, 0.5, ip="8.8.4.4", port=7999, emission=2.5), node(3, ip="2001:db8::1", port=1))
    return replace(graph(*nodes), genesis=GENESIS, fetched_at=123.5)


def test_what_was_saved_comes_back_whole(path: Path) -> None:
    saved = full()
    metagraph_refresh.save_metagraph(path, saved)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["metagraph.json"]
    loaded = metagraph_refresh.load_metagraph(path, FakeSource())
    assert loaded == saved
    assert loaded is not None
    assert loaded.nodes_by_key.get(key(3)) == saved.nodes[1]


def test_no_cache_is_no_metagraph_and_no_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert metagraph_refresh.load_metagraph(path, FakeSource()) is None
    assert not caplog.records


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"format": 2}', b'{"format": 1, "nodes": []}', b"\x00" * 4096],
)
def test_a_corrupt_cache_is_ignored_with_a_log_line(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    assert metagraph_refresh.load_metagraph(path, FakeSource()) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"ignoring the metagraph cache {path}" in record.getMessage()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 2000), flip=st.integers(0, 255))
def test_no_damage_to_the_file_raises(path: Path, cut: int, flip: int) -> None:
    metagraph_refresh.save_metagraph(path, full())
    content = bytearray(path.read_bytes())
    content[cut % len(content)] ^= flip
    path.write_bytes(content[: len(content) - cut // 3])
    loaded = metagraph_refresh.load_metagraph(path, FakeSource())
    assert loaded is None or len(loaded.nodes) == 2


@pytest.mark.parametrize(
    ("source", "served"),
    [
        (FakeSource(), True),
        (FakeSource(netuid=241), False),
        (FakeSource(name="bittensor:another"), False),
        (FakeSource(genesis=GENESIS), True),
        (FakeSource(genesis=GENESIS, name="another node of the same chain"), True),
        (FakeSource(genesis="0x" + "22" * 32), False),
    ],
)
def test_only_the_metagraph_of_the_right_subnet_and_chain_is_served(
    path: Path, source: FakeSource, served: bool, caplog: pytest.LogCaptureFixture
) -> None:
    metagraph_refresh.save_metagraph(path, full())
    assert (metagraph_refresh.load_metagraph(path, source) is not None) is served
    assert bool(caplog.records) is not served
